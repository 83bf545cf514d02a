"""``lull server``: the REST API and the scheduler, in one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

ROLES = ("all", "api", "scheduler")


def server(
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", metavar="DIR", help="Token, SQLite database, lock.")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option("--port", help="0: any free one.  [default: 7070]")] = None,
    database_url: Annotated[
        str | None,
        typer.Option("--database-url", metavar="URL", help="postgresql://… or sqlite:///…  [default: in the data dir]"),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="[default: token in the data dir]")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="[default: /etc/lull/server.toml if there]")
    ] = None,
    role: Annotated[str, typer.Option("--role", help="Only `all` in this version.")] = "all",
    insecure_i_know: Annotated[
        bool,
        typer.Option("--insecure-i-know", help="Listen without TLS where other machines can reach it."),
    ] = False,
) -> None:
    """Run the server: the REST API and the scheduler."""
    from ..agents.protocol.config_file import ConfigFileError
    from ..api.server import run
    from ..scheduler.settings import ServerSettings, SettingsError

    if role not in ROLES:
        _refuse(f"--role {role}: there is no such role; use all")
    if role != "all":
        _refuse(f"--role {role}: this version runs API and scheduler in one process; use --role all, or leave it out")
    try:
        settings = ServerSettings.load(
            config, data_dir=data_dir, host=host, port=port, database_url=database_url, token_file=token_file
        )
    except (ConfigFileError, SettingsError) as error:
        _refuse(str(error))
    raise typer.Exit(run(settings, insecure=insecure_i_know))


def _refuse(text: str) -> NoReturn:
    sys.stderr.write(f"lull server: {text}\n")
    raise typer.Exit(1)
