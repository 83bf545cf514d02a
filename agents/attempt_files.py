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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, cast

import structlog
from pydantic import BaseModel, Field, Strict, TypeAdapter, ValidationError

from . import processes
from .node_files import Bytes, Count, Seconds, Text
from .protocol.wire import AttemptEnd, ProcessIdentity, Reason

log = structlog.get_logger(__name__)

UNKILLABLE_SECONDS: Final = 60.0

_RECORD_BYTES_MAX: Final = 16 * 1024 * 1024
_WHERE_CHARS_MAX: Final = 200
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


_Number = Annotated[int, Strict(), Field(ge=-(2**31), lt=2**31)]
_T = TypeVar("_T")


class _Cleanup(BaseModel):
    code: Text
    pids: list[Count]

    def reason(self) -> Reason:
        pids = ", ".join(map(str, self.pids))
        sentence = f"{len(self.pids)} processes of the job survive SIGKILL: {pids}"
        return Reason(code=self.code, sentence=sentence, data={"pids": self.pids})


class _Exit(BaseModel):
    end: AttemptEnd
    exit_code: _Number | None = None
    signal: _Number | None = None
    started_at: Seconds | None = None
    ended_at: Seconds | None = None
    boottime: Seconds | None = None
    stragglers_killed: Count = 0
    peak_rss_bytes: Bytes | None = None
    cpu_seconds: Seconds | None = None
    message: Text | None = None
    cleanup: _Cleanup | None = None

    def outcome(self) -> AttemptOutcome:
        return AttemptOutcome(
            end=self.end,
            exit_code=self.exit_code,
            signal=self.signal,
            started_at=self.started_at,
            ended_at=self.ended_at,
            boottime=self.boottime,
            stragglers_killed=self.stragglers_killed,
            peak_rss_bytes=self.peak_rss_bytes,
            cpu_seconds=self.cpu_seconds,
            reason=None if self.message is None else Reason(code=self.end.value, sentence=self.message),
            cleanup=None if self.cleanup is None else self.cleanup.reason(),
        )


class _Lengths(BaseModel):
    log_bytes: dict[Text, Bytes] | None = None  # a record that the agent wrote for a lost runner knows none


class _Identity(BaseModel):
    boot_id: Annotated[Text, Field(min_length=1)]
    pid: Annotated[int, Strict(), Field(gt=0, lt=2**31)]
    start_ticks: Bytes

    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(boot_id=self.boot_id, pid=self.pid, start_ticks=self.start_ticks)


class _Started(BaseModel):
    pid: Annotated[int, Strict(), Field(gt=0, lt=2**31)]
    start_ticks: Bytes
    at: Seconds
    boottime: Seconds


class _Owner(BaseModel):
    """What a judgement needs of spec.json."""

    attempt_id: Annotated[Text, Field(min_length=1)]


_SPEC: Final = TypeAdapter(RunnerSpec)
_EXIT: Final = TypeAdapter(_Exit)
_LENGTHS: Final = TypeAdapter(_Lengths)
_IDENTITY: Final = TypeAdapter(_Identity)
_STARTED: Final = TypeAdapter(_Started)
_OWNER: Final = TypeAdapter(_Owner)


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
        return self._known("spec.json", _SPEC)

    def identity(self) -> ProcessIdentity | None:
        runner = self._known("identity.json", _IDENTITY)
        return None if runner is None else runner.identity()

    def was_used(self) -> bool:
        """Whether a runner was here, readable or not: what is left then has to be judged."""
        return any(_is_there(self.path / f"{name}.json") for name in ("identity", "starting", "exit"))

    def starting(self) -> bool:
        """Whether the runner came to the point after which the job may have been executed."""
        return _is_there(self.path / "starting.json")

    def started(self) -> Started | None:
        started, runner = self._known("started.json", _STARTED), self.identity()
        if started is None or runner is None:
            return None
        return Started(_job(started, runner.boot_id), started.at, started.boottime)

    def exit_record(self) -> AttemptOutcome | None:
        record = self._known("exit.json", _EXIT)
        return None if record is None else record.outcome()

    def log_bytes(self) -> dict[str, int] | None:
        """Of each stream as far as they are known, once the attempt has ended."""
        record = self.read("exit.json")
        try:
            return None if record is None else _LENGTHS.validate_python(record).log_bytes or {}
        except ValidationError:  # the attempt has ended all the same
            return {}

    def _known(self, name: str, shape: TypeAdapter[_T]) -> _T | None:
        """As `read` does; BadRecord also for values of other kinds than their writer leaves there."""
        record = self.read(name)
        if record is None:
            return None
        try:
            return shape.validate_python(record)
        except ValidationError as error:
            why = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, why["loc"]))[:_WHERE_CHARS_MAX]
            raise BadRecord(f"{self.path / name}: {where!a}: {why['msg'][:_WHERE_CHARS_MAX]}") from None

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

    def _credible(self, name: str, shape: TypeAdapter[_T]) -> _T | None:
        """For a judgement: a record that no runner can have left, as the job might plant one, is no record."""
        try:
            return self._known(name, shape)
        except BadRecord as error:
            log.warning("a record of an attempt counts for nothing", error=str(error))
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
                found = self._credible("exit.json", _EXIT)
                if found is not None:
                    return found.outcome()
                if not ours:
                    raise AttemptError(f"{self.path}: a runner still holds the lock")
                record = self._judge(kill_seconds_max)
                self._keep(record)
        except OSError:
            if _is_there(self.path / "lock") or not _is_there(self.path):
                raise
            # There is no room even for a lock. Every runner makes it first, so none of them came to the point of going.
            record = self._judge(kill_seconds_max)
        return _EXIT.validate_python(record).outcome()

    def _keep(self, record: dict[str, Any]) -> None:
        try:
            self.write("exit.json", record)
        except OSError as error:
            log.error("an attempt's record cannot be written", directory=str(self.path), error=str(error))

    def _judge(self, kill_seconds_max: float) -> dict[str, Any]:
        runner, started = self._credible("identity.json", _IDENTITY), self._credible("started.json", _STARTED)
        owner = self._credible("spec.json", _OWNER)
        boot = processes.boot_id() if runner is None else runner.boot_id
        record: dict[str, Any] = {"ended_at": time.time(), "boottime": time.clock_gettime(time.CLOCK_BOOTTIME)}
        record["started_at"] = None if started is None else started.at
        if not self.starting():
            return record | {"end": "not_started", "message": "the runner ended before it was told to go"}
        if boot != processes.boot_id():
            return record | {"end": "node_rebooted", "message": "the node was restarted while the job ran"}
        job = None if started is None else _job(started, boot)
        attempt_id = self.path.name if owner is None else owner.attempt_id
        swept = processes.kill_leftovers(attempt_id, job, kill_seconds_max)
        record |= {"end": "runner_lost", "message": "the job's runner ended without a record"}
        record["stragglers_killed"] = swept.killed
        if swept.remaining:
            record["cleanup"] = {"code": "unkillable", "pids": list(swept.remaining)}
        return record


def _job(started: _Started, boot: str) -> ProcessIdentity:
    return ProcessIdentity(boot_id=boot, pid=started.pid, start_ticks=started.start_ticks)


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
