"""`lull submit`: a job from options, from a file, or from both (options win)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from .context import Session, client_command
from .documents import mapping_of, read_yaml_mapping
from .exits import ExitCode, fail, reported
from .job_follow import follow_to_end, wait_to_end
from .output import Row, described, parts_of, text_of
from .quantities import parse_duration, parse_size

_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# As people write them in a file -> as the API names them.
_FILE_KEYS: Final = {
    "argv": "argv",
    "name": "name",
    "project": "project",
    "priority": "priority",
    "gpus": "gpus",
    "hbm": "hbm_bytes",
    "hbm_bytes": "hbm_bytes",
    "time": "time_limit_seconds",
    "time_limit_seconds": "time_limit_seconds",
    "kill_grace_seconds": "kill_grace_seconds",
    "env": "env",
    "workdir": "workdir",
}


@client_command
def submit(
    session: Session,
    argv: Annotated[list[str] | None, typer.Argument(metavar="[--] CMD [ARGS]", help="The command to run.")] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", metavar="JOB.YAML", help="Read the job from YAML.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Devices of one node.")] = None,
    hbm: Annotated[
        str | None, typer.Option("--hbm", metavar="SIZE", help="Memory on each device; default: a whole device.")
    ] = None,
    time: Annotated[str | None, typer.Option("--time", metavar="DURATION", help="Time limit: 2h, 30m, 90s.")] = None,
    priority: Annotated[int | None, typer.Option("--priority", min=-1000, max=1000, help="Higher goes first.")] = None,
    project: Annotated[str | None, typer.Option("--project", help="Who it is for.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="A name for people.")] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="K=V", help="Environment variable; may be repeated.")
    ] = None,
    workdir: Annotated[
        str | None, typer.Option("--workdir", metavar="DIR", help="Where to run it, on the node.")
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option("--idempotency-key", help="Submitting again with this key gives the same job.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait; exit with the job's own code.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Like --wait, and print its output.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return at once (the default).")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print only the job's id.")] = False,
) -> None:
    """Submit a job.

    Example: lull submit --gpus 1 --hbm 40GiB --time 2h -- python train.py --epochs 3
    """
    waiting = wait or follow
    if waiting and detach:
        fail("--detach: contradicts --wait and --follow; give one of them", ExitCode.USAGE)
    with reported(waiting=waiting):
        request: dict[str, Any] = read_job_file(file) if file else {}
        given = {
            "argv": argv or None,
            "gpus": gpus,
            "hbm_bytes": None if hbm is None else _size("--hbm", hbm),
            "time_limit_seconds": None if time is None else _duration("--time", time),
            "priority": priority,
            "project": project,
            "name": name,
            "workdir": workdir,
        }
        request.update({key: value for key, value in given.items() if value is not None})
        if env:
            request["env"] = {**request.get("env", {}), **parse_env(env)}
        if not request.get("argv"):
            fail("no command: put it behind two dashes, for example: lull submit -- python train.py", ExitCode.USAGE)
        job = session.client.submit(**request, idempotency_key=idempotency_key)
    if quiet:
        session.out.print(job.id)
    elif not follow:
        session.out.item(job, _submitted, name="id")
    if follow:
        follow_to_end(session, job.id)
    elif wait:
        wait_to_end(session, job.id, None)


def _submitted(row: Row) -> list[str]:
    reasons = [text_of(reason.get("sentence")) for reason in parts_of(row, "reasons")]
    return described([("job", str(row["id"])), ("state", str(row["state"])), ("waits", "; ".join(reasons))])


def _size(field: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        fail(f"{field}: {error}", ExitCode.USAGE)


def _duration(field: str, text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        fail(f"{field}: {error}", ExitCode.USAGE)


def parse_env(pairs: list[str]) -> dict[str, str]:
    env: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not _ENV_NAME.fullmatch(name):
            fail(f"--env: {pair!r} is not NAME=VALUE", ExitCode.USAGE)
        env[name] = value
    return env


def read_job_file(path: Path) -> dict[str, Any]:
    """The job in a YAML file, in the API's names. Wrong types are left to the API, which names the field."""
    raw = read_yaml_mapping(path, ", ".join(_FILE_KEYS))
    request: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in _FILE_KEYS:
            fail(f"{path}: unknown key {key!r}; known: {', '.join(_FILE_KEYS)}", ExitCode.USAGE)
        target = _FILE_KEYS[key]
        if target in request:
            fail(f"{path}: {key!r} and its other spelling are both given", ExitCode.USAGE)
        request[target] = _file_value(path, key, value)
    return request


def _file_value(path: Path, key: str, value: object) -> object:
    if key == "hbm" and isinstance(value, str):
        return _size(f"{path}: hbm", value)
    if key == "time" and isinstance(value, str):
        return _duration(f"{path}: time", value)
    if key == "argv" and not _is_words(value):
        fail(f"{path}: argv: has to be a list of strings, for example [python, train.py]", ExitCode.USAGE)
    if key == "env":
        pairs = mapping_of(value)
        if pairs is None or not all(isinstance(item, str) for item in pairs.values()):
            fail(f"{path}: env: has to be a mapping of names to strings; put numbers in quotes", ExitCode.USAGE)
    return value


def _is_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in cast(list[object], value))
