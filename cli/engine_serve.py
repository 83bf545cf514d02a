"""`lull engine serve`: the reference engine, as a process."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from ..vmm.reference_engine.settings import EngineSettings

DeviceOption = Annotated[
    str | None,
    typer.Option(help="Directory of the host-memory device, or the UUID of a GPU. [default: $LULL_HOST_DEVICE]"),
]


def serve(
    name: Annotated[str, typer.Option(help="Name of the model that is served.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 9001,
    device: DeviceOption = None,
    weights: Annotated[str, typer.Option(help="Size of the weights, at least 1MiB.")] = "1GiB",
    kv_cache: Annotated[str, typer.Option(help="Size of the KV cache; bounds the context.")] = "64MiB",
    seed: Annotated[int, typer.Option(help="Of the weights, and of sampling where a request names none.")] = 0,
    restore_mode: Annotated[
        list[str] | None,
        typer.Option(metavar="TAG=MODE", help="CPU, PINNED, NONE or MEMSET for a tag. Repeatable."),
    ] = None,
    immutable: Annotated[bool, typer.Option("--immutable", help="Keep the weights' backup from park to park.")] = False,
    control_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the key of the control routes. [default: the key itself is $LULL_ENGINE_CONTROL_KEY]"
        ),
    ] = None,
    witness: Annotated[Path | None, typer.Option(help="File to note every generation request in.")] = None,
    memory_service: Annotated[
        Path | None, typer.Option(metavar="SOCKET", help="Keep the weights in this memory service. [default: own]")
    ] = None,
    kv_offload_host: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Host memory for blocks of the KV cache; emptied by a park, and stays held."),
    ] = "0",
    kv_offload_dir: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Folder for blocks of the KV cache; kept over a park.")
    ] = None,
    kv_offload_dir_size: Annotated[
        str, typer.Option(metavar="SIZE", help="The most that the folder may hold; the blocks used longest ago go.")
    ] = "1GiB",
    threads: Annotated[int, typer.Option(help="Threads that compute.")] = 1,
    token_delay: Annotated[float, typer.Option(metavar="SECONDS", help="Wait after each token.")] = 0.0,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="NAME[=TIMES]", help="Go wrong on purpose, for tests. Repeatable.")
    ] = None,
) -> None:
    """Serve a small deterministic model from a host-memory device or a GPU, with TensorRT-LLM's control routes."""
    from ..vmm.errors import LullMemoryError
    from ..vmm.reference_engine import settings as checks
    from ..vmm.reference_engine.faults import parse_faults

    try:
        settings = checks.EngineSettings(
            name=name,
            host=host,
            port=port,
            device=checks.open_device(device),
            weights_bytes=checks.parse_bytes(weights, "--weights"),
            kv_cache_bytes=checks.parse_bytes(kv_cache, "--kv-cache"),
            control_key=checks.read_control_key(control_key_file),
            seed=seed,
            restore_modes=checks.parse_restore_modes(restore_mode or []),
            immutable=immutable,
            witness=witness,
            memory_service=memory_service,
            kv_offload_host_bytes=checks.parse_bytes(kv_offload_host, "--kv-offload-host"),
            kv_offload_dir=kv_offload_dir,
            kv_offload_dir_bytes_max=checks.parse_bytes(kv_offload_dir_size, "--kv-offload-dir-size"),
            threads=threads,
            token_delay_seconds=token_delay,
            faults=parse_faults(fault or []),
        )
        _serve(settings)
    except (LullMemoryError, OSError) as error:
        _leave(str(error), 1)
    except ValueError as error:
        _leave(str(error), 2)


def _serve(settings: EngineSettings) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave_starting)
    if settings.memory_service is not None:
        _say_if_missing(settings.memory_service)
    gc.disable()  # what torch makes at its import stays: looking through it is a sixth of the import's time
    try:
        from ..vmm.reference_engine.server import serve_engine
    except ImportError as error:
        _leave(f"{error}; the reference engine needs the extra: pip install 'gpu-lull[torch]'", 1)
    gc.freeze()
    gc.enable()
    serve_engine(settings)


def _leave_starting(_number: int, _frame: FrameType | None) -> None:
    """Nothing is held yet, and an exception out of the middle of torch's import would be shown with its traceback."""
    os._exit(0)


def _say_if_missing(memory_service: Path) -> None:
    """Before torch, whose import takes seconds. The engine waits for the service once it needs it."""
    from ..vmm.service.client import ServiceClient
    from ..vmm.service.errors import ServiceUnavailable

    try:
        ServiceClient(memory_service, connect_seconds_max=0).close()
    except ServiceUnavailable as error:
        print(f"lull engine serve: waiting for it: {error}", file=sys.stderr)


def _leave(message: str, code: int) -> NoReturn:
    print(f"lull engine serve: {message}", file=sys.stderr)
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(serve)
