"""`lull memory-service`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..vmm.service.command import ServiceSettings, run_service
from ..vmm.service.holdings import Limits

_DEFAULT = Limits()


def memory_service(
    device: Annotated[str, typer.Option(help="Directory of the host-memory device, or UUID of the GPU.")],
    socket: Annotated[Path, typer.Option(help="Unix socket by which engines attach; its folder is made private.")],
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="For log and pid file. [default: log to standard error]")
    ] = None,
    allow_uid: Annotated[
        list[int] | None,
        typer.Option(metavar="UID", help="User that may attach besides our own. Repeatable."),
    ] = None,
    clients_max: Annotated[int, typer.Option(min=1, help="Connections at once.")] = _DEFAULT.clients_max,
    pools_max: Annotated[int, typer.Option(min=1, help="Pools at once.")] = _DEFAULT.pools_max,
    oom_wait_seconds_max: Annotated[
        float, typer.Option(min=0, help="Longest wait for memory of the device to become free.")
    ] = _DEFAULT.oom_wait_seconds_max,
    copy_threads: Annotated[int, typer.Option(min=1, max=64, help="Threads that copy in a park or a wake.")] = 2,
) -> None:
    """Own pools of one device's memory that outlive the engines which use them."""
    settings = ServiceSettings(
        device=device,
        socket=socket,
        state_dir=state_dir,
        allowed_uids=tuple(allow_uid or ()),
        copy_threads=copy_threads,
        limits=Limits(clients_max=clients_max, pools_max=pools_max, oom_wait_seconds_max=oom_wait_seconds_max),
    )
    raise typer.Exit(run_service(settings))
