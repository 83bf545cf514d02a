"""An attempt's directory as the agent sees it: the spec it writes, the records it reads, the judgement it passes.

The directory is the truth. exit.json of a runner that cannot write it any more is written under that runner's lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, cast

import structlog

from . import processes
from .protocol.wire import AttemptEnd, ProcessIdentity, Reason

log = structlog.get_logger(__name__)

UNKILLABLE_SECONDS: Final = 60.0

_RECORD_BYTES_MAX: Final = 16 * 1024 * 1024
_LOCK_SECONDS_MAX: Final = 5.0
_LOOK_SECONDS: Final = 0.01
_NODE_TROUBLE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO})


class AttemptError(Exception):
    """AttemptError: something about an attempt's directory or runner is not as it must be.

    ├── BadSpec         (a ValueError) no runner could obey it; the text names the field
    ├── LaunchFailed    the runner did not come up; nothing was executed
    ├── RunnerSilent    no answer in time: ask again, every request may be repeated
    ├── RunnerGone      there is no runner to talk to: `wait_ended` says how the attempt ended
    ├── RunnerRefused   the runner did not understand or did not want it
    └── BadRecord       a file of the directory is not what its writer leaves there
    """


class BadSpec(AttemptError, ValueError): ...


class LaunchFailed(AttemptError): ...


class RunnerSilent(AttemptError): ...


class RunnerGone(AttemptError): ...


class RunnerRefused(AttemptError): ...


class BadRecord(AttemptError): ...


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """All that a runner knows about its job."""

    attempt_id: str
    job_id: str
    argv: list[str]
    env: dict[str, str]
    workdir: str | None = None  # None: HOME of env, else /
    time_limit_seconds: float | None = None
    restore_by_boottime: float | None = None  # CLOCK_BOOTTIME of this node
    kill_grace_seconds: float = 30.0
    go_seconds_max: float = 60.0
    log_head_bytes: int = 64 * 1024 * 1024  # of each stream
    log_tail_bytes: int = 64 * 1024 * 1024
    unkillable_seconds_max: float = UNKILLABLE_SECONDS

    def check(self) -> None:
        """Raises BadSpec, naming the field, for what no runner could obey."""
        texts = {"attempt_id": self.attempt_id, "job_id": self.job_id, "workdir": self.workdir or ""}
        texts |= {f"argv[{index}]": part for index, part in enumerate(self.argv)}
        texts |= {f"env[{name!r}]": name + value for name, value in self.env.items()}
        for name, text in texts.items():
            if "\0" in text:
                raise BadSpec(f"{name} must not contain a NUL character")
        for name in self.env:
            if not name or "=" in name:
                raise BadSpec(f"env: {name!r} cannot be the name of a variable")
        if not self.argv or not self.argv[0]:
            raise BadSpec("argv must begin with a command")
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise BadSpec(f"workdir must be an absolute path, not {self.workdir!r}")
        for name in ("kill_grace_seconds", "go_seconds_max", "log_head_bytes", "log_tail_bytes"):
            if getattr(self, name) < 0:
                raise BadSpec(f"{name} must not be negative")


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How an attempt ended: what exit.json says."""

    end: AttemptEnd
    exit_code: int | None = None
    signal: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    boottime: float | None = None
    stragglers_killed: int = 0
    peak_rss_bytes: int | None = None  # of the largest process
    cpu_seconds: float | None = None  # of all that were waited for
    reason: Reason | None = None
    cleanup: Reason | None = None  # processes that could not be killed: their devices are not free


@dataclass(frozen=True, slots=True)
class Started:
    job: ProcessIdentity
    at: float
    boottime: float


class AttemptDir:
    """One attempt's directory, mode 0700; it is used for one execution."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"AttemptDir({str(self.path)!r})"

    def write_spec(self, spec: RunnerSpec) -> None:
        spec.check()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.write("spec.json", asdict(spec))
        _sync_directory(self.path.parent)

    def spec(self) -> RunnerSpec | None:
        record = self.read("spec.json")
        if record is None:
            return None
        known = {each.name for each in fields(RunnerSpec)}
        return RunnerSpec(**{name: value for name, value in record.items() if name in known})

    def identity(self) -> ProcessIdentity | None:
        record = self.read("identity.json")
        return None if record is None else self._identity(record)

    def starting(self) -> bool:
        """Whether the runner came to the point after which the job may have been executed."""
        return _is_there(self.path / "starting.json")

    def started(self) -> Started | None:
        record = self.read("started.json")
        runner = self.identity()
        if record is None or runner is None:
            return None
        job = self._identity({**record, "boot_id": runner.boot_id})
        return Started(job, record["at"], record["boottime"])

    def _identity(self, record: dict[str, Any]) -> ProcessIdentity:
        try:
            return ProcessIdentity.model_validate(record)
        except ValueError as error:
            raise BadRecord(f"{self.path}: no identity of a process: {error}") from None

    def exit_record(self) -> AttemptOutcome | None:
        record = self.read("exit.json")
        return None if record is None else _outcome(record)

    def read(self, name: str) -> dict[str, Any] | None:
        """Raises BadRecord for what the job may have planted, OSError for what says nothing about the file."""
        try:
            fd = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in _NODE_TROUBLE:
                raise
            raise BadRecord(f"{self.path / name}: {error}") from None
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise BadRecord(f"{self.path / name}: not a regular file")
            content = file.read(_RECORD_BYTES_MAX)
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"{self.path / name}: {error}") from None
        if not isinstance(record, dict):
            raise BadRecord(f"{self.path / name}: not a JSON object")
        return cast("dict[str, Any]", record)

    def _readable(self, name: str) -> dict[str, Any] | None:
        """For a judgement: a record that no runner can have left, as the job might plant one, is no record."""
        try:
            return self.read(name)
        except BadRecord:
            return None

    def write(self, name: str, record: dict[str, Any]) -> None:
        part = self.path / f"{name}.new"
        fd = os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(json.dumps(record).encode("ascii") + b"\n")
            file.flush()
            os.fsync(fd)
        part.rename(self.path / name)
        _sync_directory(self.path)

    @contextmanager
    def runner_lock(self, seconds_max: float) -> Generator[bool]:
        """Whether no runner lives here: while this holds, none can begin. Blocks."""
        fd = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            deadline = time.monotonic() + seconds_max
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        yield False
                        return
                    time.sleep(_LOOK_SECONDS)
                else:
                    yield True
                    return
        finally:
            os.close(fd)

    def settle(self, kill_seconds_max: float = UNKILLABLE_SECONDS) -> AttemptOutcome:
        """Judges an attempt whose runner is gone: kills what is left of it and writes the record. Blocks.

        Nothing but the record, a job that was provably never forked, or another boot ends an attempt. A record that a
        full disk does not take is still the judgement: the next one comes to the same. Raises OSError where it cannot
        be looked at now.
        """
        try:
            with self.runner_lock(_LOCK_SECONDS_MAX) as ours:
                record = self._readable("exit.json")
                if record is None:
                    if not ours:
                        raise AttemptError(f"{self.path}: a runner still holds the lock")
                    record = self._judge(kill_seconds_max)
                    self._keep(record)
        except OSError:
            if _is_there(self.path / "lock") or not _is_there(self.path):
                raise
            # There is no room even for a lock. Every runner makes it first, so none of them came to the point of going.
            record = self._judge(kill_seconds_max)
        return _outcome(record)

    def _keep(self, record: dict[str, Any]) -> None:
        try:
            self.write("exit.json", record)
        except OSError as error:
            log.error("an attempt's record cannot be written", directory=str(self.path), error=str(error))

    def _judge(self, kill_seconds_max: float) -> dict[str, Any]:
        runner, started, spec = (self._readable(f"{name}.json") or {} for name in ("identity", "started", "spec"))
        boot = runner.get("boot_id", processes.boot_id())
        record: dict[str, Any] = {"ended_at": time.time(), "boottime": time.clock_gettime(time.CLOCK_BOOTTIME)}
        record["started_at"] = started.get("at")
        if not self.starting():
            return record | {"end": "not_started", "message": "the runner ended before it was told to go"}
        if boot != processes.boot_id():
            return record | {"end": "node_rebooted", "message": "the node was restarted while the job ran"}
        job = None
        if started:
            job = ProcessIdentity(boot_id=boot, pid=started["pid"], start_ticks=started["start_ticks"])
        swept = processes.kill_leftovers(spec.get("attempt_id", self.path.name), job, kill_seconds_max)
        record |= {"end": "runner_lost", "message": "the job's runner ended without a record"}
        record["stragglers_killed"] = swept.killed
        if swept.remaining:
            record["cleanup"] = {"code": "unkillable", "pids": list(swept.remaining)}
        return record


def _outcome(record: dict[str, Any]) -> AttemptOutcome:
    end = AttemptEnd(record["end"])
    cleanup: dict[str, Any] | None = record.get("cleanup")
    message: str | None = record.get("message")
    return AttemptOutcome(
        end=end,
        exit_code=record.get("exit_code"),
        signal=record.get("signal"),
        started_at=record.get("started_at"),
        ended_at=record.get("ended_at"),
        boottime=record.get("boottime"),
        stragglers_killed=record.get("stragglers_killed", 0),
        peak_rss_bytes=record.get("peak_rss_bytes"),
        cpu_seconds=record.get("cpu_seconds"),
        reason=None if message is None else Reason(code=end.value, sentence=message),
        cleanup=None if cleanup is None else _cleanup_reason(cleanup),
    )


def _cleanup_reason(cleanup: dict[str, Any]) -> Reason:
    pids = cleanup["pids"]
    return Reason(
        code=cleanup["code"],
        sentence=f"{len(pids)} processes of the job survive SIGKILL: {', '.join(map(str, pids))}",
        data={"pids": pids},
    )


def _is_there(path: Path) -> bool:
    """Raises OSError where that cannot be told: a record that is not seen is not one that is not there."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
