"""The agent's process: settings, signals, logs, and the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path
from typing import IO, Any, Final, TextIO, cast

import structlog

from .errors import AgentError
from .gateway.launch import GatewayNotStarted
from .opening import refuse_copy
from .processes import boot_id, is_same, send_signal, wait_exited
from .protocol.config_file import ConfigFileError, load_toml
from .protocol.wire import ProcessIdentity
from .settings import AgentSettings

STOP_EVERYTHING: Final = signal.SIGUSR2
_STOP_SECONDS_MAX: Final = 900.0


def load_settings(config: Path, given: dict[str, Any]) -> AgentSettings:
    """The file at ``config`` with what the command line gave in its place; raises ConfigFileError."""
    return load_toml(config, AgentSettings, given)


def run_agent(config: Path, given: dict[str, Any], *, stop: bool) -> int:
    """The exit code: 0, or 1 with one line on stderr that says what to change."""
    _log_to_stderr()
    try:
        settings = load_settings(config, given)
        if stop and _tell_running(Path(settings.data_dir)):
            return 0
        with asyncio.Runner(loop_factory=_new_loop()) as runner:
            runner.run(_run(settings, stop=stop))
    except (ConfigFileError, AgentError, GatewayNotStarted) as error:
        sys.stderr.write(f"lull agent: {error}\n")
        return 1
    return 0


async def _run(settings: AgentSettings, *, stop: bool) -> None:
    from .daemon import Daemon

    daemon = Daemon(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop)
    loop.add_signal_handler(STOP_EVERYTHING, daemon.stop_everything)
    if stop:
        daemon.stop_everything()
    await daemon.run()


def _tell_running(data_dir: Path) -> bool:
    """True once the agent that ran there is gone; False if none ran. A copy of its directory names it too."""
    refuse_copy(data_dir, boot_id())
    try:
        process = ProcessIdentity.model_validate_json((data_dir / "agent.json").read_text())
    except (OSError, ValueError):
        return False
    if not is_same(process) or not send_signal(process, STOP_EVERYTHING):
        return False
    if not asyncio.run(wait_exited(process, _STOP_SECONDS_MAX)):
        raise AgentError(f"the agent (pid {process.pid}) has not stopped after {_STOP_SECONDS_MAX} s; see its log")
    return True


def _new_loop() -> Any:
    import uvloop

    return uvloop.new_event_loop


class LossyStream:
    """Drops what cannot be written: a full disk or a closed pipe behind the log must not end what the log is about."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def _log_to_stderr() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", LossyStream(sys.stderr))),
        cache_logger_on_first_use=True,
    )
