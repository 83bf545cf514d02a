"""`lull agent`: the daemon of one node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def agent(
    config: Annotated[Path, typer.Option(metavar="FILE", help="The agent's TOML file.")] = Path("/etc/lull/agent.toml"),
    server: Annotated[str | None, typer.Option(help="Address of the server; default: server_url of the file.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="Default: token_file of the file.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Default: data_dir of the file.")] = None,
    stop: Annotated[
        bool,
        typer.Option(
            "--stop",
            help="Tell the agent of this directory to recall its loans, end its engines and its gateway, and exit."
            " If none runs, one is started for that.",
        ),
    ] = False,
) -> None:
    """Look after this node's engines: park them for jobs, run the jobs, bring the engines back.

    SIGTERM ends the agent alone: engines, gateway and jobs go on, and the next agent adopts them.
    """
    # Here, so that `lull --help` is quick and works without the [agent] extra.
    from ..agents.main import run_agent

    given = {"server_url": server, "token_file": token_file, "data_dir": data_dir}
    raise typer.Exit(run_agent(config, {key: value for key, value in given.items() if value is not None}, stop=stop))
