"""The `[engines.cuda_checkpoint]` of one engine: what the driver cannot be asked. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .protocol.written import Written


class CudaCheckpointOptions(Written):
    """Which processes are checkpointed together, and how long a lock may take."""

    # "command": all processes that the engine's command started; "port": those of whoever listens on the port of url.
    # None: "command" where there is one.
    pids_from: Literal["command", "port"] | None = None
    # More only for processes that do not wait for each other on the GPU: locking one of them hangs then.
    processes_max: Annotated[int, Field(ge=1, le=64)] = 1
    lock_seconds_max: Annotated[float, Field(gt=0, le=3600)] = 30.0


def checkpoint_fault(command: list[str] | None, options: CudaCheckpointOptions) -> str | None:
    """What is wrong with the table for an engine of that command; None if nothing is."""
    if options.pids_from == "command" and command is None:
        return 'cuda_checkpoint.pids_from: there is no command; use "port", or say how the engine is started'
    return None
