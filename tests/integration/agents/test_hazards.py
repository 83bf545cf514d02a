"""Paths on which an engine could be routed wrongly, left behind or killed for nothing; each was once possible."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from lull.agents import attempt_run, engine_hand, engine_keeper
from lull.agents.engine_process import ENGINE_MARK
from lull.agents.engines.base import Observation
from lull.agents.engines.http_call import call
from lull.agents.errors import AgentError, CanaryFailed, EngineLost, EngineTimedOut
from lull.agents.processes import find_by_environ
from lull.agents.protocol.loans import LoanState, LoanStep
from lull.agents.protocol.parking import FOR_OVER
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import AttemptEnd, EngineState, GateState, RecallLoan, RestartEngine, SetPolicy
from lull.agents.upstream import read_order, read_registered
from tests.agent_node import AgentNode, EngineUnderTest, agent_node
from tests.gates.webhook_server import SECRET, WebhookServer
from tests.odd_json import DEEP, KEYS_DEEP

WAITS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


def alerts(node: AgentNode) -> list[str]:
    return [alert["code"] for alert in node.reports("alert")]


async def test_a_wake_that_was_broken_off_is_not_taken_for_a_right_engine(tmp_path: Path) -> None:
    """An orphan is resumed, the proof of its bytes fails once: the canary still stands before its gate."""
    async with agent_node(tmp_path, EngineUnderTest(faults=["wrong-after-wake"])) as node:
        keeper = node.keeper()
        right = (await node.ask()).json()["choices"]
        bytes_back = keeper._bytes_back
        failed: list[bool] = []

        async def fails_once(step: object) -> None:
            if not failed:
                failed.append(True)
                raise EngineLost("test: the bytes were not looked at")
            await bytes_back(step)  # type: ignore[arg-type]

        keeper._bytes_back = fails_once  # type: ignore[method-assign]
        await keeper.adapter.park(keeper.policy, 10)
        await node.until(lambda: failed, "the wake that fails")
        await node.until(lambda: keeper.verified and keeper.gate_state is GateState.OPEN, "the engine is back")
        assert (await node.ask()).json()["choices"] == right


async def test_an_engine_that_has_parked_is_not_its_own_witness(tmp_path: Path) -> None:
    """No golden answer is taken from a process between its park and its proof, whatever the policy becomes."""
    async with agent_node(tmp_path) as node:
        keeper = node.keeper()
        async with keeper.hand:
            keeper.released()
            other = EnginePolicy.model_validate(
                {**keeper.policy.model_dump(), "canary": {"prompt": "new", "tokens": 2}}
            )
            assert not keeper.may_give_golden()
            with pytest.raises(CanaryFailed, match="no golden answer"):
                await keeper.verify(lambda step, data: None, other, take_golden=keeper.may_give_golden())
        await node.ready()  # condemned, restarted, and right


async def test_two_engines_do_not_count_the_same_free_bytes(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        keeper = node.keeper()
        assert node.daemon is not None
        facts = await node.daemon.node.look()
        (device_id,) = keeper.device_ids
        async with keeper.hand:
            keeper.remember(footprint={device_id: keeper.device_bytes[device_id] + facts[device_id].free_bytes})
            assert keeper._lacking(facts) == {}
            node.daemon.node.waking["another"] = lambda facts: {device_id: 1}
            assert list(keeper._lacking(facts)) == [device_id]


async def test_a_key_that_is_refused_is_no_reason_to_kill_a_serving_engine(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        keeper = node.keeper()
        first = keeper.incarnation
        key = tmp_path / "alpha.key"
        right = key.read_text()
        key.write_text("another key")
        await node.until(lambda: "engine_not_observable" in alerts(node), "the alert")
        assert (await node.ask()).status_code == 200
        key.write_text(right)
        await node.open_loan(node.job(["true"]))
        await node.until_closed()
        assert LoanStep.SPAWNED in node.steps()
        assert keeper.incarnation == first


async def test_an_operator_s_restart_overrides_never(tmp_path: Path) -> None:
    async with agent_node(tmp_path, EngineUnderTest(policy={"restart": "never"})) as node:
        keeper = node.keeper()
        first = keeper.incarnation
        await node.order(RestartEngine(engine_id=keeper.engine_id))
        await node.until(lambda: keeper.incarnation not in (first, None), "a new process")
        await node.ready()


async def test_never_is_remembered_over_an_agent_s_restart(tmp_path: Path) -> None:
    async with agent_node(tmp_path, EngineUnderTest(policy={"restart": "never"})) as node:
        process = node.keeper().process_identity
        assert process is not None
        await node.stop()
        os.kill(process.pid, signal.SIGKILL)
        await node.start()
        await node.until(lambda: "engine_not_ready" in alerts(node), "the alert")
        assert node.keeper().process_identity is None


async def test_what_a_dead_engine_leaves_behind_is_ended_before_the_next_one(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        keeper = node.keeper()
        assert keeper.process is not None
        assert keeper.process_identity is not None
        main = keeper.process_identity.pid
        orphan = os.spawnvpe(os.P_NOWAIT, "sleep", ["sleep", "300"], {**os.environ, ENGINE_MARK: keeper.engine_id})
        os.kill(main, signal.SIGKILL)
        await node.until(lambda: keeper.incarnation is not None and str(main) not in keeper.incarnation, "a new one")
        await node.ready()
        assert os.waitpid(orphan, 0)[1] == signal.SIGKILL
        assert keeper.pids() == set(find_by_environ(ENGINE_MARK, keeper.engine_id))


async def test_a_runner_that_is_stopped_does_not_hold_the_engine_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_run, "_SILENT_SECONDS", 0.2)
    script = "import os, signal, time; os.kill(os.getppid(), signal.SIGSTOP); print('up', flush=True); time.sleep(60)"
    async with agent_node(tmp_path, unkillable_seconds_max=0.2) as node:
        job = node.job([sys.executable, "-c", script], kill_grace_seconds=0.2)
        await node.open_loan(job)
        runner = tmp_path / "agent" / "attempts" / job.attempt_id / "identity.json"

        def stopped() -> bool:
            if not runner.exists():
                return False
            pid = json.loads(runner.read_text())["pid"]
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"

        await node.until(stopped, "the job stopped its runner")
        await node.order(RecallLoan(loan_id="loan-1", reason="test"))
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert end["end"] == AttemptEnd.RUNNER_LOST
        assert "runner_silent" in alerts(node)
        assert find_by_environ("LULL_ATTEMPT", job.attempt_id) == []
        assert (await node.ask()).status_code == 200


async def test_an_attempt_whose_directory_is_gone_is_never_started_again(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        job = node.job(WAITS)
        await node.open_loan(job)
        await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
        await node.crash()
        shutil.rmtree(tmp_path / "agent" / "attempts" / job.attempt_id)
        await node.start()
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert end["end"] == AttemptEnd.RUNNER_LOST
        assert find_by_environ("LULL_ATTEMPT", job.attempt_id) == []


async def test_an_engine_of_a_loan_that_is_back_is_looked_after_while_another_one_is_not(tmp_path: Path) -> None:
    engines = [
        EngineUnderTest("alpha", devices=[0]),
        EngineUnderTest("beta", devices=[1], faults=["lose-weights"], policy={"restart": "never"}),
    ]
    async with agent_node(tmp_path, *engines, capacities=[16 << 20, 16 << 20]) as node:
        await node.open_loan(node.job(["true"], device_ids=node.device_ids), engines=["alpha", "beta"])
        await node.until(lambda: node.states()[-1:] == ["faulted"], "faulted")
        await node.ready("alpha")
        alpha = node.keeper("alpha")
        first = alpha.incarnation
        assert alpha.process_identity is not None
        os.kill(alpha.process_identity.pid, signal.SIGKILL)
        await node.until(lambda: alpha.incarnation not in (first, None), "alpha is restarted")
        await node.ready("alpha")
        assert (await node.ask("alpha")).status_code == 200
        assert node.keeper("beta").gate_state is GateState.CLOSED


async def test_an_engine_that_is_back_serves_on_when_an_agent_starts_while_another_one_is_not(tmp_path: Path) -> None:
    """Its gate is one that may open by itself: it is looked at, and must not be taken for such a one."""
    hook = await WebhookServer().start()
    (tmp_path / "secret").write_bytes(SECRET)
    section = {"url": f"http://127.0.0.1:{hook.port}/", "secret_file": tmp_path / "secret", "allow": ["127.0.0.0/8"]}
    engines = [
        EngineUnderTest("alpha", devices=[0], more={"gate_kind": "webhook", "webhook": section}),
        EngineUnderTest("beta", devices=[1], faults=["lose-weights"], policy={"restart": "never"}),
    ]
    try:
        async with agent_node(tmp_path, *engines, capacities=[16 << 20] * 2, gate_poll_seconds=0.05) as node:
            await node.open_loan(node.job(["true"], device_ids=node.device_ids), engines=["alpha", "beta"])
            await node.until(lambda: node.states()[-1:] == ["faulted"], "faulted")
            await node.ready("alpha")
            await node.crash()
            began = len(hook.calls)
            await node.start()
            await node.ready("alpha")
            looked = len(hook.calls)
            await node.until(lambda: len(hook.calls) > looked + 5, "its gate is looked at again and again")
            assert "close" not in [one["verb"] for one in hook.calls[began:]]
            assert hook.state == "open"
            assert "gate_opened_by_itself" not in alerts(node)
            assert not node.keeper("alpha").gate.is_wanted_closed
    finally:
        await hook.stop()


async def test_an_engine_that_stays_away_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_keeper, "POLL_SECONDS_MAX", 0.01)
    monkeypatch.setattr(engine_keeper, "_BACK_OFF_SECONDS_MAX", 0.05)
    async with agent_node(tmp_path, EngineUnderTest(attached=True)) as node:
        keeper = node.keeper()
        observe = keeper.adapter.observe

        async def silent() -> Observation:
            return Observation(EngineState.UNREACHABLE, detail="hangs")

        for times in (1, 2):
            keeper.adapter.observe = silent  # type: ignore[method-assign]
            await node.until(lambda: keeper._failures > 5, "it is looked at again and again")
            assert alerts(node).count("engine_not_running") == times
            keeper.adapter.observe = observe  # type: ignore[method-assign]
            await node.ready()
            await node.until(lambda: keeper._failures == 0, "it is well")


async def test_a_node_that_was_rebooted_starts_nothing_more_in_an_old_loan(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        job = node.job(WAITS)
        await node.open_loan(job)
        await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
        await node.crash()
        import sqlite3

        db = sqlite3.connect(tmp_path / "agent" / "journal.sqlite")
        db.execute("UPDATE loan SET boot_id = 'another boot'")
        db.commit()
        db.close()
        await node.start()
        await node.until_closed()
        assert node.reports("loan_changed")[-1]["state"] == "closed"
        assert node.keeper().state is EngineState.RUNNING


async def test_a_restart_for_other_flags_cuts_no_request(tmp_path: Path) -> None:
    engine = EngineUnderTest(extra=["--token-delay", "0.4"], policy={"drain_seconds_max": 0.2, "canary": {"tokens": 1}})
    async with agent_node(tmp_path, engine) as node:
        keeper = node.keeper()
        first = keeper.incarnation
        slow = asyncio.create_task(node.ask())

        async def in_flight() -> bool:
            return (await keeper.gate.observe(keeper.engine_id)).in_flight == 1

        await node.until(in_flight, "the request is in flight")
        modes = {"model_weights": "PINNED", "kv_cache": "NONE"}
        other = EnginePolicy.model_validate({**keeper.policy.model_dump(), "restore_modes": modes})
        await node.order(SetPolicy(engine_id=keeper.engine_id, version=2, policy=other))
        assert (await slow).status_code == 200
        await node.until(lambda: keeper.incarnation not in (first, None), "the restart, once nothing is in flight")
        await node.ready()
        assert keeper.modes_in_effect() == modes


async def test_an_engine_that_trickles_its_answer_holds_nobody() -> None:
    """Each byte comes in time, the whole never does: the bound is on the call, not on the silence between bytes."""
    left = asyncio.Event()

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        try:
            while True:
                try:
                    async with asyncio.timeout(0.05):
                        if await reader.read(4096) == b"":
                            break
                except TimeoutError:
                    writer.write(b" ")
                    await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()
            left.set()

    async with await asyncio.start_server(trickle, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(EngineTimedOut, match="whole"):
            await call("GET", f"http://127.0.0.1:{port}/health", 0.2)
        await asyncio.wait_for(left.wait(), 10)


@pytest.mark.parametrize("content", [b"<html>", b"[]", b'"x"', b'{"policies": 3}', b"{}", b"", DEEP, KEYS_DEEP])
def test_an_answer_that_is_none_is_a_value_error_and_no_fault_of_the_agent(content: bytes) -> None:
    with pytest.raises(ValueError):
        read_registered(content)


@pytest.mark.parametrize("line", [DEEP, KEYS_DEEP, b'{"seq": 7, "order": ' + DEEP])
def test_a_line_too_deep_to_be_read_is_no_order(line: bytes) -> None:
    with pytest.raises(AgentError, match="is no order"):
        read_order(line)


def test_an_order_that_cannot_be_read_does_not_hold_up_those_behind_it() -> None:
    policy = {**EnginePolicy().model_dump(mode="json"), "a_field_of_the_next_release": 1}
    order = {"kind": "set_policy", "engine_id": "e", "version": 2, "policy": policy}
    envelope = read_order(json.dumps({"seq": 7, "term": 3, "incarnation": 2, "order": order}).encode())
    assert (envelope.seq, envelope.term, envelope.incarnation) == (7, 3, 2)
    assert envelope.order is not None
    assert envelope.order.kind.startswith("unreadable set_policy")
    answer = {"incarnation": 1, "term": 1, "lease_seconds": 30, "orders_after": 0, "acknowledged": 0}
    good = {"engine_id": "f", "version": 1, "policy": EnginePolicy().model_dump(mode="json")}
    registered = read_registered(
        json.dumps({**answer, "policies": [{"engine_id": "e", "version": 2, "policy": policy}, good]}).encode()
    )
    assert [one.engine_id for one in registered.policies] == ["f"]


async def test_a_wrong_key_is_said_and_the_engine_is_left_running(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        keeper = node.keeper()
        first = keeper.incarnation
        key = tmp_path / "alpha.key"
        right = key.read_text()
        async with keeper.hand:
            key.write_text("wrong")
            keeper.remember(verified=None)  # as after a start of the agent that knows nothing of it yet
        await node.until(
            lambda: keeper.reason is not None and "cannot be asked" in keeper.reason.sentence, "the reason is shown"
        )
        assert keeper.gate_state is GateState.CLOSED
        key.write_text(right)
        await node.ready()
        assert keeper.incarnation == first


async def test_an_engine_that_stays_parked_over_every_resume_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound on the call that no call can keep: a mended policy rules from the next loan on, and that never came."""
    monkeypatch.setattr(engine_hand, "RESUMES_MAX", 2)
    async with agent_node(tmp_path, EngineUnderTest(policy={"resume_seconds_max": 0.001})) as node:
        first = node.keeper().incarnation
        await node.open_loan(node.job(["true"]))
        await node.until(lambda: "faulted" in node.states(), "it is given up")
        reason = node.last_reason()
        assert reason is not None
        assert "still parked after 2 resumes" in reason["sentence"]
        await node.until_closed()
        await node.ready()
        assert node.keeper().incarnation != first
        assert node.steps().count(LoanStep.RESUME_SENT) == 2
        assert (await node.ask()).status_code == 200


async def test_a_loan_that_ends_while_it_settles_says_why(tmp_path: Path) -> None:
    slow = EngineUnderTest(policy={"settle_samples": 100, "settle_seconds_max": 60})
    async with agent_node(tmp_path, slow) as node:
        await node.open_loan(node.job(["true"]))
        await node.until(lambda: node.state() is LoanState.SETTLING, "the loan settles")
        node.loan().recall(FOR_OVER)
        await node.until_closed()
        reason = node.last_reason()
        assert reason is not None
        assert reason["code"] == FOR_OVER
        assert "the time is over for which an operator parked the engine" in reason["sentence"]
