"""Every device of an engine is judged: what it releases, what was learned of it, and what it takes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from lull.agents.journal import boottime
from lull.agents.protocol.loans import LoanState, LoanStep
from lull.agents.protocol.plans import Plan, Way, suffices, way_in, ways_of
from lull.vmm import HostDevice, HostDriver, Pool
from lull.vmm.tags import RestoreMode
from tests.engines.spawned import MIB, ROOT
from tests.engines.stand_in_node import StandInNode, StandInUnderTest, stand_in_node

KV = {"kv_cache": RestoreMode.NONE}
WHOLE = {"model_weights": RestoreMode.CPU, "kv_cache": RestoreMode.NONE}


@asynccontextmanager
async def two_ranks(root: Path, *, trial_park: bool = True) -> AsyncIterator[StandInNode]:
    """4 MiB of weights and 2 MiB of KV cache on each of two devices of 16 MiB; its parks were tried, or not."""
    engine = StandInUnderTest(
        kind="vllm",
        script="vllm_server.py",
        flags=["--enable-sleep-mode", "--version", "0.33.0"],
        devices=[0, 1],
        settings={
            "trial_park": trial_park,
            "env": {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT)},
        },
        policy={"settle_seconds_max": 2, "restore_modes": {tag: str(mode) for tag, mode in WHOLE.items()}},
    )
    async with stand_in_node(root, engine) as node:
        yield node


def alerts(node: StandInNode, code: str) -> list[dict]:
    return [alert for alert in node.reports("alert") if alert["code"] == code]


def ways_now(node: StandInNode) -> tuple[Way, ...]:
    """As the scheduler makes them, of what the agent reports."""
    report = node.keeper().changed()
    policy = node.keeper().policy
    return ways_of(report.capabilities, policy, report.learned, report.device_bytes, report.residual_bytes)


async def lend(
    node: StandInNode,
    number: int,
    *faults: str,
    plan: Plan | None = None,
    hbm_mib: int = 13,
    devices: list[str] | None = None,
) -> str:
    """A job on the first device alone, unless others are said; all of the loan is told by its steps."""
    node.set_faults(*faults)
    loan_id = f"loan-{number}"
    plans = {} if plan is None else {"alpha": plan}
    wanted = devices or node.device_ids[:1]
    job = node.job(["true"], hbm_bytes=hbm_mib * MIB, device_ids=wanted)
    needs = dict.fromkeys(wanted, hbm_mib * MIB)
    await node.open_loan(job, loan_id=loan_id, epoch=number, plans=plans, need_bytes_by_device=needs)
    await node.until_closed(loan_id)
    node.set_faults()
    await node.ready()
    return loan_id


async def test_each_device_has_to_release_and_to_come_back(tmp_path: Path) -> None:
    async with two_ranks(tmp_path) as node:
        first, second = node.device_ids
        learned = node.keeper().changed().learned
        assert learned is not None
        for modes, freed in ((KV, 2 * MIB), (WHOLE, 6 * MIB)):
            way = way_in(learned, modes)
            assert way is not None
            assert way.freed_bytes == {first: freed, second: freed}

        # The second rank frees late: the job, which is on the first device only, waits for it all the same.
        late = await lend(node, 1, "rank_late")
        assert node.data_of(LoanStep.SETTLED, late)["device_bytes"] == {first: 0, second: 0}
        assert LoanStep.SPAWNED in node.steps(late)

        # A plan for the KV cache alone leaves the weights on both.
        plan = Plan(modes=KV, whole=False, freed_bytes={first: 2 * MIB, second: 2 * MIB})
        small = await lend(node, 2, plan=plan, hbm_mib=12)
        assert node.data_of(LoanStep.SETTLED, small)["device_bytes"] == {first: 4 * MIB, second: 4 * MIB}
        assert [call for call in node.calls() if "release_kv" in call] == ["POST /release_kv_cache_memory"] * 2

        # A rank that keeps its memory is no park, though the first device has all that the job wants.
        keeps = await lend(node, 3, "rank_keeps")
        assert LoanStep.SPAWNED not in node.steps(keeps)
        reason = node.last_reason(keeps)
        assert reason is not None
        assert reason["code"] == "HBMNotFreed"
        assert set(reason["data"]["unreleased"]) == {second}
        report = node.keeper().changed()
        assert report.learned is not None
        way = way_in(report.learned, WHOLE)
        assert way is not None
        assert way.freed_bytes == {first: 6 * MIB, second: 6 * MIB}, "a park that failed is not what the engine can do"
        assert report.residual_bytes == {first: 0, second: 0}
        whole = next(each.plan for each in ways_now(node) if each.plan.whole)
        again = await lend(node, 4, plan=whole)
        assert LoanStep.SPAWNED in node.steps(again), "the whole policy is tried again"

        # Nor does one come back of which a part stays away.
        half = await lend(node, 5, "rank_half_wake")
        assert "faulted" in node.states(half)
        assert alerts(node, "engine_lost")[-1]["sentence"].endswith(f"holds 4194304 of 6291456 bytes on {second}")


async def test_a_part_that_one_device_did_not_release_is_not_promised_again(tmp_path: Path) -> None:
    async with two_ranks(tmp_path) as node:
        first, second = node.device_ids
        plan = Plan(modes=KV, whole=False, freed_bytes={first: 2 * MIB, second: 2 * MIB})
        keeps = await lend(node, 1, "rank_keeps", plan=plan, hbm_mib=12)
        reason = node.last_reason(keeps)
        assert reason is not None
        assert (reason["code"], set(reason["data"]["unreleased"])) == ("HBMNotFreed", {second})
        both = {first: 2 * MIB, second: 2 * MIB}
        assert all(way.plan.whole for way in ways_now(node) if suffices([way], both))
        assert any(way.plan.whole for way in ways_now(node) if suffices([way], {first: 6 * MIB, second: 6 * MIB}))

        # It was this process that did not: the next one is believed as before.
        node.keeper().want_restart()
        before = node.keeper().incarnation
        await node.until(lambda: node.keeper().incarnation not in (None, before), "another process")
        await node.ready()
        assert any(not way.plan.whole for way in ways_now(node) if suffices([way], both))


async def test_a_first_park_in_which_a_device_gave_nothing_teaches_nothing(tmp_path: Path) -> None:
    async with two_ranks(tmp_path, trial_park=False) as node:
        first, second = node.device_ids
        # Whether the job wants that device or not: what it shows is that a rank has not released.
        for number, wanted in ((1, [first, second]), (2, [first])):
            failed = await lend(node, number, "rank_keeps", devices=wanted)
            assert (LoanStep.SPAWNED in node.steps(failed)) is (wanted == [first])
            report = node.keeper().changed()
            assert report.learned is not None
            assert way_in(report.learned, WHOLE) is None
            assert report.residual_bytes == {}
        whole = await lend(node, 3, "rank_late", devices=[first])
        assert node.data_of(LoanStep.SETTLED, whole)["freed_bytes"] == {first: 6 * MIB, second: 6 * MIB}
        assert node.keeper().parks.freed_bytes(WHOLE) == {first: 6 * MIB, second: 6 * MIB}


async def test_room_is_proved_on_every_device_and_alarms_name_the_device(tmp_path: Path) -> None:
    async with two_ranks(tmp_path) as node:
        first, second = node.device_ids
        parks = node.keeper().parks
        # As if it had freed more once on the second device, and kept less: the alarms are about that device.
        record = parks._record(WHOLE)
        parks._write(WHOLE, {**record, "first": {first: 6 * MIB, second: 9 * MIB}})
        kv = parks._record(KV)
        parks._write(KV, {**kv, "residuals": [{first: 4 * MIB, second: 3 * MIB}]})
        node.set_faults()
        job = node.job(["true"], hbm_bytes=13 * MIB)
        await node.open_loan(job, expects_more=True)
        node.daemon.node.connected.set()  # type: ignore[union-attr]
        await node.until(lambda: node.attempt_end(job.attempt_id), "the job has run")
        [less] = alerts(node, "park_frees_less")
        assert less["data"]["devices"] == {second: {"learned_bytes": 9 * MIB, "freed_bytes": 6 * MIB}}

        # Somebody takes the second device: nothing is resumed, the gate stays closed, until it is free again.
        pool = Pool(HostDriver(HostDevice.open(tmp_path / "device1")))
        block = pool.allocate(12 * MIB, "stranger")
        node.loan().recall("test")
        await node.until(lambda: node.loan().state is LoanState.WAKING, "waking")
        for _ in range(10):  # it looks as often meanwhile
            await node.keeper().node.look()
            assert LoanStep.RESUME_SENT not in node.steps()
        freed_at = boottime()
        pool.free(block)
        await node.until_closed()
        [proved] = [row for row in node.daemon.journal.steps("loan-1") if row.step is LoanStep.ROOM_PROVED]  # type: ignore[union-attr]
        assert proved.boottime > freed_at
        assert node.data_of(LoanStep.ROOM_PROVED)["free_bytes"] == {first: 16 * MIB, second: 16 * MIB}

        plan = Plan(modes=KV, whole=False, freed_bytes={first: 2 * MIB, second: 2 * MIB})
        await lend(node, 2, plan=plan, hbm_mib=12)
        [grown] = alerts(node, "residual_grows")
        assert set(grown["data"]["devices"]) == {second}
        assert grown["data"]["devices"][second]["residual_bytes"] == [3 * MIB, 4 * MIB]
        assert "lull engine restart alpha" in grown["sentence"]
