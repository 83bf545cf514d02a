"""An operator's commands: what their exit codes mean, what they are given, and what bounds them."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lull.agents.engine_process import EngineProcess
from lull.agents.engines import command
from lull.agents.engines.command import CommandAdapter
from lull.agents.engines.ledger import Ledger
from lull.agents.errors import EngineRefused, EngineTimedOut, EngineUnreachable
from lull.agents.processes import identity
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import EngineState
from lull.agents.settings import EngineSettings
from tests.tracing import held_at_its_end
from tests.waiting import wait_until_async

LEDGERS = Path("/nowhere")


@pytest.fixture(autouse=True)
def ledgers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LEDGERS", tmp_path_factory.mktemp("ledgers"))


class Outside:
    incarnation: str | None = "boot:4711:9"
    process: EngineProcess | None = None

    def pids(self) -> set[int]:
        return set()

    async def held_bytes(self) -> dict[str, int]:
        return {}


def adapter(ledger: Path | None = None, **fields: Any) -> CommandAdapter:
    """`true` for each command that is not given. Without a ``ledger`` it has one of its own."""
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
    if ledger is None:
        ledger = LEDGERS / f"{uuid.uuid4()}.json"
    return CommandAdapter(EngineSettings.model_validate(settings), Ledger(ledger), Outside())


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


async def is_running(one: CommandAdapter) -> bool:
    return (await one.observe()).state is EngineState.RUNNING


async def test_a_command_that_cannot_be_killed_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in an uninterruptible wait: the agent goes on, and starts no other beside it."""
    monkeypatch.setattr(command, "_KILLED_SECONDS_MAX", 0.3)
    pid_file = tmp_path / "pid"
    one = adapter(park_command=sh(f"echo $$ > {pid_file}; exec sleep 600"))
    park = asyncio.create_task(one.park(EnginePolicy(), 2))
    pid = int(await wait_until_async(lambda: pid_file.exists() and pid_file.read_text(), 5, "its pid"))
    with held_at_its_end(pid) as tracer:
        if tracer is None:
            pytest.skip("this machine forbids tracing")
        with pytest.raises(EngineTimedOut, match=f"cannot be killed: process {pid} runs"):
            await asyncio.wait_for(park, 10)
        seen = await one.observe()
        assert (seen.state, seen.is_our_fault) == (EngineState.UNREACHABLE, True)
        assert f"process {pid}" in seen.detail
        tracer.let_go()
        await wait_until_async(lambda: is_running(one), 5, "that it is told again")
        assert identity(pid) is None, "reaped"


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_an_agent_without_descriptors_says_nothing_about_the_engine() -> None:
    one = adapter()
    with no_more_descriptors():
        seen = await one.observe()
        with pytest.raises((EngineUnreachable, EngineRefused), match="Too many open files"):
            await one.park(EnginePolicy(), 5)
    assert (seen.state, seen.is_our_fault) == (EngineState.UNREACHABLE, True)
    assert (await one.observe()).state is EngineState.RUNNING


BECOMES_ROOT = "#include <unistd.h>\nint main(void) { return setresuid(0, 0, 0) || sleep(2); }\n"
AS_NOBODY = """
import asyncio, os, sys
from lull.agents.engines import command
from lull.agents.processes import boot_id
from tests.unit.agents.test_command_adapter import adapter
command._KILLED_SECONDS_MAX = 0.2
boot_id()  # as an agent knows it from its start on
asyncio.run(adapter().observe())  # what Python loads late, it loads now: nobody may not read where it lies
os.setgid(65534)
os.setuid(65534)
seen = asyncio.run(adapter(observe_command=[sys.argv[1]], observe_seconds_max=0.3).observe())
print(seen.state.value, seen.detail)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a command that becomes root")
def test_a_command_that_became_root_is_let_be() -> None:
    """As `sudo` does: this user may not end it."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "install gcc"
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to others
        Path(folder).chmod(0o755)
        becomes_root = Path(folder) / "becomes_root"
        subprocess.run(
            [compiler, "-D_GNU_SOURCE", "-xc", "-", "-o", becomes_root], input=BECOMES_ROOT, text=True, check=True
        )
        becomes_root.chmod(0o4755)
        argv = [sys.executable, "-c", AS_NOBODY, str(becomes_root)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.startswith("unreachable "), done.stderr
    assert "cannot be killed" in done.stdout


async def test_a_command_that_outlives_its_agent_is_seen_by_the_next_one(tmp_path: Path) -> None:
    """The script is killed with the process that runs it here; what an agent killed by SIGKILL leaves is its ledger."""
    ledger, pipe = tmp_path / "ledger.json", tmp_path / "pipe"
    os.mkfifo(pipe)
    first = asyncio.create_task(adapter(ledger, park_command=sh(f"read line < {pipe}")).park(EnginePolicy(), 60))
    await wait_until_async(lambda: '"pid"' in (ledger.read_text() if ledger.exists() else ""), 10, "the command begins")
    next_one = adapter(ledger)
    seen = await next_one.observe()
    assert seen.state is EngineState.PARKING
    assert "still runs: process" in seen.detail
    left = tmp_path / "left.json"
    shutil.copy(ledger, left)
    pipe.write_text("go on\n")
    await first
    after = adapter(left)  # it ended by itself, and nobody saw with what code
    assert (await after.observe()).state is EngineState.RUNNING
    assert after.unseen_seconds_max() == 0


async def test_a_wake_that_outlives_its_agent_is_not_begun_twice(tmp_path: Path) -> None:
    ledger, pipe = tmp_path / "ledger.json", tmp_path / "pipe"
    os.mkfifo(pipe)
    first = asyncio.create_task(adapter(ledger, resume_command=sh(f"read line < {pipe}")).resume(EnginePolicy(), 60))
    await wait_until_async(lambda: '"pid"' in (ledger.read_text() if ledger.exists() else ""), 10, "the command begins")
    assert (await adapter(ledger, observe_command=sh("exit 10")).observe()).state is EngineState.WAKING
    pipe.write_text("go on\n")
    await first
    assert (await adapter(ledger, observe_command=sh("exit 10")).observe()).state is EngineState.PARKED


async def test_what_a_killed_park_command_began_may_go_on(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.json"
    with pytest.raises(EngineTimedOut):
        await adapter(ledger, park_command=["sleep", "60"]).park(EnginePolicy(), 0.1)
    assert math.isinf(adapter(ledger).unseen_seconds_max())
    with pytest.raises(EngineTimedOut):
        await adapter(ledger, park_command=["false"]).park(EnginePolicy(), 5)
    assert adapter(ledger).unseen_seconds_max() == 0, "it ended by itself"
    with pytest.raises(EngineUnreachable):
        await adapter(ledger, park_command=["/nowhere/park"]).park(EnginePolicy(), 5)
    assert adapter(ledger).unseen_seconds_max() == 0
