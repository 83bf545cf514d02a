"""The command line of the gateway: one signature for `lull gateway` and `python -m lull.agents.gateway`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .settings import GatewaySettings, Limits, parse_listen

_DEFAULT = Limits()


def gateway(
    control: Annotated[Path, typer.Option(metavar="SOCKET", help="Unix socket by which the agent rules the gates.")],
    state_dir: Annotated[Path, typer.Option(metavar="DIR", help="Where routes are kept over a restart.")],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address for clients.")] = "127.0.0.1:8070",
    pid_file: Annotated[Path | None, typer.Option(help="Default: gateway.pid in the state directory.")] = None,
    log_file: Annotated[Path | None, typer.Option(help="Kept below 16 MiB. Default: standard error.")] = None,
    body_bytes_max: Annotated[int, typer.Option(min=1, help="Longest request body.")] = _DEFAULT.body_bytes_max,
    buffered_bytes_max: Annotated[
        int, typer.Option(min=1, help="Bodies of all requests together; of those that closed gates hold, half.")
    ] = _DEFAULT.buffered_bytes_max,
    requests_max: Annotated[
        int, typer.Option(min=1, help="Requests at once; those that closed gates hold, half.")
    ] = _DEFAULT.requests_max,
    connections_max: Annotated[
        int, typer.Option(min=1, help="Clients at once; fewer where the file limit leaves no room.")
    ] = _DEFAULT.connections_max,
    silence_seconds_max: Annotated[
        float, typer.Option(min=0.1, help="Longest time without a byte from the engine, client there or gone.")
    ] = _DEFAULT.silence_seconds_max,
    keepalive_seconds: Annotated[
        float, typer.Option(min=0.05, help="Between comments to streaming clients that wait.")
    ] = _DEFAULT.keepalive_seconds,
    stop_seconds_max: Annotated[
        float, typer.Option(min=0, help="For requests in flight after SIGTERM.")
    ] = _DEFAULT.stop_seconds_max,
    reuse_connections: Annotated[
        bool, typer.Option(help="Use a connection to an engine again while its gate stays open.")
    ] = True,
) -> None:
    """Streaming proxy in front of this node's engines that holds or refuses requests while an engine is lent out."""
    try:
        host, port = parse_listen(listen)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--listen") from None
    # Here, so that `lull --help` does not load aiohttp.
    from .process import run

    limits = Limits(
        body_bytes_max=body_bytes_max,
        buffered_bytes_max=buffered_bytes_max,
        requests_max=requests_max,
        connections_max=connections_max,
        silence_seconds_max=silence_seconds_max,
        keepalive_seconds=keepalive_seconds,
        stop_seconds_max=stop_seconds_max,
    )
    settings = GatewaySettings(
        host=host,
        port=port,
        control=control.absolute(),
        state_dir=state_dir.absolute(),
        pid_file=(pid_file or state_dir / "gateway.pid").absolute(),
        log_file=None if log_file is None else log_file.absolute(),
        reuse_connections=reuse_connections,
        limits=limits,
    )
    raise typer.Exit(run(settings))
