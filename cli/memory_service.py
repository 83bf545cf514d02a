"""`lull memory-service`: runs one, or says what one holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..vmm.errors import LullMemoryError
from ..vmm.service.client import drop_pool, read_state
from ..vmm.service.command import UID_MAX, ServiceSettings, run_service
from ..vmm.service.holdings import Limits

_DEFAULT = Limits()


def memory_service(
    socket: Annotated[
        Path,
        typer.Option(
            help="Unix socket by which engines attach, in a folder of its own; made private if it is not there."
        ),
    ],
    device: Annotated[
        str | None, typer.Option(help="Serve this: directory of a host-memory device, or UUID of a GPU.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print what the service on the socket holds, as JSON.")] = False,
    drop: Annotated[
        str | None, typer.Option(metavar="POOL", help="Clear a pool of the service that no engine uses.")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="For log and pid file. [default: log to standard error]")
    ] = None,
    allow_uid: Annotated[
        list[int] | None,
        typer.Option(metavar="UID", min=0, max=UID_MAX, help="User that may attach besides our own: 0 lets root."),
    ] = None,
    clients_max: Annotated[int, typer.Option(min=1, help="Connections at once.")] = _DEFAULT.clients_max,
    pools_max: Annotated[int, typer.Option(min=1, help="Pools at once.")] = _DEFAULT.pools_max,
    oom_wait_seconds_max: Annotated[
        float, typer.Option(min=0, help="Longest wait for memory of the device to become free.")
    ] = _DEFAULT.oom_wait_seconds_max,
    copy_threads: Annotated[int, typer.Option(min=1, max=64, help="Threads that copy in a park or a wake.")] = 2,
) -> None:
    """Own pools of one device's memory that outlive the engines which use them."""
    if show or drop is not None:
        _ask(socket, drop)
        return
    if device is None:
        raise typer.BadParameter("is missing: which device is to be served?", param_hint="--device")
    settings = ServiceSettings(
        device=device,
        socket=socket,
        state_dir=state_dir,
        allowed_uids=tuple(allow_uid or ()),
        copy_threads=copy_threads,
        limits=Limits(clients_max=clients_max, pools_max=pools_max, oom_wait_seconds_max=oom_wait_seconds_max),
    )
    raise typer.Exit(run_service(settings))


def _ask(socket: Path, drop: str | None) -> None:
    try:
        if drop is not None:
            drop_pool(socket, drop)
        print(json.dumps(read_state(socket)["pools"], indent=2))
    except LullMemoryError as error:
        print(f"lull memory-service: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
