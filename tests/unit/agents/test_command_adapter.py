"""An operator's commands: what their exit codes mean, what they are given, and what bounds them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lull.agents.engine_process import EngineProcess
from lull.agents.engines.command import CommandAdapter
from lull.agents.errors import EngineRefused, EngineTimedOut
from lull.agents.processes import identity
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import EngineState
from lull.agents.settings import EngineSettings
from tests.waiting import wait_until_async


class Outside:
    incarnation: str | None = "boot:4711:9"
    process: EngineProcess | None = None

    def pids(self) -> set[int]:
        return set()

    async def held_bytes(self) -> dict[str, int]:
        return {}


def adapter(**fields: Any) -> CommandAdapter:
    """`true` for each command that is not given."""
    settings = {
        "name": "alpha",
        "kind": "command",
        "models": ["alpha"],
        "url": "http://127.0.0.1:9",
        "device_indexes": [0],
        "park_command": ["true"],
        "resume_command": ["true"],
        "observe_command": ["true"],
        **fields,
    }
    return CommandAdapter(EngineSettings.model_validate(settings), Outside())


def sh(text: str) -> list[str]:
    return ["sh", "-c", text]


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (0, EngineState.RUNNING),
        (10, EngineState.PARKED),
        (11, EngineState.PARKING),
        (12, EngineState.FAILED),
        (1, EngineState.UNREACHABLE),
        (127, EngineState.UNREACHABLE),
    ],
)
async def test_exit_codes_of_observe(code: int, state: EngineState) -> None:
    seen = await adapter(observe_command=sh(f"echo noise; echo why {code}; exit {code}")).observe()
    assert (seen.state, f"why {code}" in seen.detail) == (state, True)
    assert bool(seen.parked_tags) is (state is EngineState.PARKED)


async def test_a_park_that_refuses_and_one_that_is_unknown() -> None:
    with pytest.raises(EngineRefused, match="not today"):
        await adapter(park_command=sh("echo not today; exit 10")).park(EnginePolicy(), 5)
    with pytest.raises(EngineTimedOut, match="code 3: half of it"):
        await adapter(park_command=sh("echo half of it >&2; exit 3")).park(EnginePolicy(), 5)
    await adapter().park(EnginePolicy(), 5)


async def test_what_a_command_is_given(tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = f'echo "$LULL_ENGINE_NAME $LULL_ENGINE_URL $LULL_ENGINE_PID $LULL_TAGS" > {out}'
    await adapter(park_command=sh(text)).park(EnginePolicy(), 5)
    assert out.read_text().strip() == "alpha http://127.0.0.1:9 4711 kv_cache,model_weights"


async def test_what_a_command_starts_carries_no_mark_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lull up --stop` ends what carries its mark, and an agent adopts what carries an engine's."""
    monkeypatch.setenv("LULL_UP", str(tmp_path))
    monkeypatch.setenv("LULL_ENGINE", "alpha")
    monkeypatch.setenv("OF_THE_OPERATOR", "kept")
    out = tmp_path / "out"
    await adapter(resume_command=sh(f"env > {out}")).resume(EnginePolicy(), 5)
    given = {line.partition("=")[0] for line in out.read_text().splitlines()}
    assert "OF_THE_OPERATOR" in given
    assert {name for name in given if name.startswith("LULL_")} == {
        "LULL_ENGINE_NAME",
        "LULL_ENGINE_URL",
        "LULL_ENGINE_PID",
        "LULL_TAGS",
    }


async def test_arguments_are_no_shell_s_text(tmp_path: Path) -> None:
    await adapter(park_command=["true", f"; touch {tmp_path}/made"]).park(EnginePolicy(), 5)
    assert list(tmp_path.iterdir()) == []


async def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    hangs = sh(f"sleep 600 & echo $! > {pid_file}; wait")
    with pytest.raises(EngineTimedOut, match="killed"):
        await adapter(park_command=hangs).park(EnginePolicy(), 0.3)
    child = int(pid_file.read_text())
    await wait_until_async(lambda: identity(child) is None, 5, "the end of its child")


async def test_output_without_end_neither_blocks_it_nor_is_kept() -> None:
    floods = sh("head -c 3000000 /dev/zero | tr '\\0' x; echo; echo the end")
    seen = await adapter(observe_command=floods).observe()
    assert (seen.state, seen.detail) == (EngineState.RUNNING, "the end")


async def test_a_child_that_holds_the_output_open_is_not_waited_for() -> None:
    seen = await asyncio.wait_for(adapter(observe_command=sh("echo ok; sleep 5 & exit 10")).observe(), 3)
    assert (seen.state, seen.detail) == (EngineState.PARKED, "ok")


async def test_a_command_that_closes_its_output_early() -> None:
    seen = await adapter(observe_command=sh("echo ok; exec >&- 2>&-; sleep 0.1; exit 10")).observe()
    assert (seen.state, seen.detail) == (EngineState.PARKED, "ok")


async def test_a_command_that_cannot_be_started_says_nothing_about_the_engine() -> None:
    seen = await adapter(observe_command=["/nowhere/observe"]).observe()
    assert (seen.state, seen.is_our_fault) == (EngineState.UNREACHABLE, True)
    with pytest.raises(Exception, match="/nowhere/park cannot be started"):
        await adapter(park_command=["/nowhere/park"]).park(EnginePolicy(), 5)
