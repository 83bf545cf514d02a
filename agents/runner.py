"""Runs one attempt in one directory, once, and leaves a record of how it ended.

Started by path with ``python -I -S``: it needs the standard library and its siblings ``runner_*``, nothing else. The
contract is the directory: spec.json in; identity.json, starting.json, started.json, exit.json, logs/ and control.sock
out. It owns the job's processes, logs, time limit and ``restore_by``, and needs no agent. It executes at most once per
directory (a lock is held for life, starting.json is flushed before the fork), signals nothing but its own descendants,
and writes exit.json only when none of them lives, or says that they could not be killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import types
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from .runner_attempt import Runner

EXIT_USAGE: Final = 64
EXIT_REFUSED: Final = 75
EXIT_BAD_SPEC: Final = 78

_PACKAGE: Final = "lull_runner"
_SPEC_BYTES_MAX: Final = 16 * 1024 * 1024
_EXIT_RECORD_BYTES: Final = 8192
_PATH_BYTES_MAX: Final = 4096
_NUMBER: Final = (int, float)
_SPEC_FIELDS: Final[dict[str, tuple[type, ...]]] = {
    "attempt_id": (str,),
    "argv": (list,),
    "env": (dict,),
    "workdir": (str, types.NoneType),
    "time_limit_seconds": (*_NUMBER, types.NoneType),
    "restore_by_boottime": (*_NUMBER, types.NoneType),
    "kill_grace_seconds": _NUMBER,
    "go_seconds_max": _NUMBER,
    "log_head_bytes": (int,),
    "log_tail_bytes": (int,),
}


class Refused(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def lock_directory() -> int:
    """Held for life. The descriptor is closed by exec, so no job keeps it."""
    lock = os.open("lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refused(EXIT_REFUSED, "another runner holds this directory") from None
    for name in ("starting.json", "exit.json"):
        if os.path.lexists(name):
            raise Refused(EXIT_REFUSED, f"{name} exists: this attempt had its one execution")
    return lock


def read_spec() -> dict[str, Any]:
    try:
        with open("spec.json", "rb") as file:
            spec: dict[str, Any] = json.loads(file.read(_SPEC_BYTES_MAX))
    except (OSError, ValueError) as error:
        raise Refused(EXIT_BAD_SPEC, f"spec.json: {error}") from None
    for name, kinds in _SPEC_FIELDS.items():
        if name not in spec or not isinstance(spec[name], kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise Refused(EXIT_BAD_SPEC, f"spec.json: field {name} must be {wanted}")
    argv: list[Any] = spec["argv"]
    if not argv or not all(isinstance(part, str) for part in argv):
        raise Refused(EXIT_BAD_SPEC, "spec.json: field argv must be a list of at least one string")
    return spec


def prepare(argument: str) -> Runner:
    from .runner_attempt import Runner
    from .runner_files import put, reserve
    from .runner_processes import become_subreaper, stat_of

    directory = await_directory() if argument == "-" else argument
    umask = os.umask(0o077)
    os.chdir(directory)
    log = os.open("runner.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    os.dup2(log, 2)
    os.close(log)
    lock_directory()
    spec = read_spec()
    become_subreaper()
    reserve("exit.json", _EXIT_RECORD_BYTES)
    runner = Runner(spec, umask)
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    stat = stat_of(os.getpid())
    assert stat is not None
    put("identity.json", {"boot_id": boot_id, "pid": os.getpid(), "start_ticks": stat[1]})
    return runner


def await_directory() -> str:
    """A spare runner, up before there is a job for it. Whoever started it ended without one: so does it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, _PATH_BYTES_MAX)
        if not data or len(line) > _PATH_BYTES_MAX:
            os._exit(0)
        line += data
    return os.fsdecode(bytes(line[:-1]))


def tell(text: str) -> None:
    """To whoever started us, through standard output; whether anybody reads it does not matter."""
    with contextlib.suppress(OSError):
        os.write(1, text.encode("utf-8", "replace") + b"\n")
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def main(arguments: list[str]) -> NoReturn:
    os.closerange(3, 1 << 20)
    try:
        if len(arguments) != 2:
            raise Refused(EXIT_USAGE, f"usage: {arguments[0]} ATTEMPT_DIRECTORY, or - to read it from standard input")
        runner = prepare(arguments[1])
    except Refused as refused:
        tell(f"refused: {refused}")
        os._exit(refused.code)
    except OSError as error:
        tell(f"refused: {error}")
        os._exit(1)
    tell("ready")
    runner.run()


if __name__ == "__main__":
    # Started by path there is no package: this makes the siblings importable relatively without the product's
    # packages, and their compiled form is kept, which a script's own is not.
    package = types.ModuleType(_PACKAGE)
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    sys.modules[_PACKAGE] = package
    __package__ = _PACKAGE
    main(sys.argv)
