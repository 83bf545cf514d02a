"""`lull engine policy get` and `set`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from .context import Session, client_command
from .documents import mapping_of, read_yaml_mapping
from .engine import EngineArgument
from .exits import ExitCode, fail
from .options import OutputFormat
from .output import Row, plain, text_of
from .quantities import parse_duration

RESTARTS: Final = (
    "engine {engine}: other restore modes take effect by a restart, as soon as no loan has it; its gate is closed and"
    " drained for that"
)


@client_command
def get_policy(session: Session, engine: EngineArgument) -> None:
    """Print an engine's policy."""
    session.out.item(session.client.policy(engine), policy_lines, name="engine_id")


def policy_lines(row: Row) -> list[str]:
    state = "locked by the agent's TOML" if row["locked"] else "may be set"
    lines = [f"# version {row['version']} (in force: {row['version_in_force']}), {state}"]
    if row.get("refused"):
        lines.append(f"# refused by its agent: {text_of(row['refused'])}")
    return lines + [f"{key} = {text_of(value)}" for key, value in _flat(row["policy"])]


def _flat(policy: Row, prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in policy.items():
        inner = mapping_of(value)
        pairs += [(f"{prefix}{key}", value)] if inner is None else _flat(inner, f"{prefix}{key}.")
    return pairs


@client_command
def set_policy(
    session: Session,
    engine: EngineArgument,
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FIELD=VALUE]...", help="For example when=always restore_modes.kv_cache=NONE."),
    ] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", metavar="POLICY.YAML", help="The whole policy.")] = None,
) -> None:
    """Change fields of an engine's policy; the others stay. With -f the file is the whole policy.

    Other restore modes restart an engine that the agent supervises; everything else rules from the next loan on.
    Somebody else's change in between is noticed and nothing is overwritten (exit code 5).
    """
    if bool(changes) == (file is not None):
        fail("give either FIELD=VALUE pairs or -f FILE", ExitCode.USAGE)
    current = session.client.policy(engine)
    policy: dict[str, Any] = _read_policy_file(file) if file else plain(current.policy)
    for change in changes or []:
        apply_change(policy, change)
    changed = session.client.put_policy(engine, policy, expected_version=current.version)
    if changed.policy.restore_modes != current.policy.restore_modes:  # refused where the agent does not supervise it
        print(f"lull: {RESTARTS.format(engine=engine)}", file=sys.stderr)
    if session.out.form in (OutputFormat.TABLE, OutputFormat.WIDE):
        session.out.print(f"engine {engine}: policy version {changed.version}")
    else:
        session.out.item(changed, policy_lines, name="engine_id")


def apply_change(policy: dict[str, Any], change: str) -> None:
    """Put `a.b=value` into `policy`. Values are numbers, true, false, null, durations for times, else text."""
    path, equals, text = change.partition("=")
    if not equals or not path:
        fail(f"{change!r} is not FIELD=VALUE", ExitCode.USAGE)
    *parents, last = path.split(".")
    place = policy
    for parent in parents:
        inner = mapping_of(place.get(parent))
        if inner is None:
            inner = place[parent] = {}
        place = inner
    place[last] = _value(last, text)


def _value(name: str, text: str) -> Any:
    if "_seconds" in name:
        try:
            return parse_duration(text)
        except ValueError as error:
            fail(f"{name}: {error}", ExitCode.USAGE)
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, float) and not math.isfinite(value):
        return text  # what JSON cannot carry the server refuses by the field's name
    return text if isinstance(value, str | dict | list) else value


def _read_policy_file(path: Path) -> dict[str, Any]:
    raw = read_yaml_mapping(path, "policy fields")
    # What `policy get -o yaml` prints may be edited and set again.
    policy = mapping_of(raw.get("policy", raw))
    if policy is None:
        fail(f"{path}: policy: has to be a mapping of policy fields", ExitCode.USAGE)
    return policy
