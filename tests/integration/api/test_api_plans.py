"""The plan of an engine for a need, and plans beside what happened, over REST and as the command line prints them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import httpx

from lull.agents.protocol.capabilities import Capabilities, ParkPlan
from lull.agents.protocol.loans import LoanStep
from lull.agents.protocol.plans import Learned, ParkLearned
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import EngineDeclared, LoanStepTaken, OpenLoan
from lull.cli.engine import engine_lines
from lull.cli.engine_plan import plan_lines
from lull.cli.plan_text import loan_plan_lines
from lull.scheduler.decide import decide
from lull.scheduler.store import Store
from lull.vmm.tags import RestoreMode
from tests.cli_here import run_here
from tests.wire_node import GIB, WireNode

DEVICE = "node-1-device-0"
MODES = EnginePolicy().restore_modes
KV = {"kv_cache": RestoreMode.NONE}


def learning(node: WireNode) -> EngineDeclared:
    """A GiB of its own, half of it KV cache, on a device of 2 GiB."""
    declared = node.engine("alpha")
    able = ParkPlan(name="by tag", modes={tag: [mode] for tag, mode in MODES.items()}, any_subset=True)
    ways = [
        ParkLearned(
            modes=KV,
            freed_bytes={DEVICE: GIB // 2},
            residual_bytes={DEVICE: GIB // 2},
            residual_first_bytes={DEVICE: GIB // 4},
            park_seconds=0.5,
            wake_seconds=0.25,
            parks=2,
        ),
        ParkLearned(modes=MODES, freed_bytes={DEVICE: GIB}, park_seconds=20.0, wake_seconds=3.0, parks=1),
    ]
    changes = {"capabilities": Capabilities(engine="x", plans=[able]), "learned": Learned(ways=ways)}
    return declared.model_copy(update={"engine": declared.engine.model_copy(update=changes)})


async def made(http: httpx.AsyncClient) -> WireNode:
    node = WireNode(http)
    node.engines = (learning(node),)
    await node.register()
    await node.report({"kind": "device_observed", "device_id": DEVICE, "index": 0, "device_kind": "host_discrete",
                       "capacity_bytes": 2 * GIB, "free_bytes": GIB})  # fmt: skip
    return node


async def test_the_plan_for_a_need(http: httpx.AsyncClient) -> None:
    await made(http)
    small = (await http.get("/engines/alpha/plan", params={"hbm_bytes": 3 * GIB // 2})).json()
    assert (small["plan"]["tags"], small["plan"]["whole"]) == (["kv_cache"], False)
    assert small["plan"]["freed_bytes"] == {DEVICE: GIB // 2}
    assert small["plan"]["room_bytes"] == {DEVICE: 3 * GIB // 2}
    assert [other["tags"] for other in small["alternatives"]] == [["kv_cache", "model_weights"]]
    assert plan_lines(small, {}) == [
        "engine: alpha",
        "need:   1.5GiB on 1 device",
        "plan:   kv_cache (park 500ms, wake 250ms)",
        f"  {DEVICE}: frees 512MiB, then 1.5GiB free",
        "not chosen:",
        "  kv_cache, model_weights (park 20s, wake 3.0s): it is predicted to take 23.0 s, the chosen one 0.8 s",
    ]
    large = (await http.get("/engines/node-1-alpha/plan", params={"hbm_bytes": 2 * GIB})).json()
    assert large["plan"]["whole"]
    none = (await http.get("/engines/alpha/plan", params={"hbm_bytes": 2 * GIB + 1, "gpus": 1})).json()
    assert none["plan"] is None
    assert plan_lines(none, {})[2].startswith("plan:   none: with all parked as their policies say device")
    for params in ({}, {"hbm_bytes": 0}, {"hbm_bytes": 1, "gpus": 0}, {"hbm_bytes": "20GiB"}):
        assert (await http.get("/engines/alpha/plan", params=params)).status_code == 422, params
    assert (await http.get("/engines/nope/plan", params={"hbm_bytes": 1})).status_code == 404


def cli_environ(root: Path, url: str, token: str) -> dict[str, str]:
    token_file = root / "token"
    token_file.write_text(token)
    token_file.chmod(0o600)
    environ = {"PATH": os.environ["PATH"], "LULL_CONFIG": str(root / "none.toml"), "LULL_SERVER": url}
    return {**environ, "LULL_TOKEN_FILE": str(token_file)}


async def test_the_command(http: httpx.AsyncClient, live_url: str, token: str, tmp_path: Path) -> None:
    await made(http)
    environ = cli_environ(tmp_path, live_url, token)

    async def run(*words: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(run_here, ("engine", "plan", *words), environ)

    ended = await run("alpha", "--hbm", "1.5GiB", "--gpus", "1", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["plan"]["tags"] == ["kv_cache"]
    shown = await run("alpha", "--hbm", "1.5GiB")
    assert "plan:   kv_cache (park 500ms, wake 250ms)" in shown.stdout.splitlines()
    wrong = await run("alpha", "--hbm", "20G")
    assert (wrong.returncode, "--hbm" in wrong.stderr) == (2, True)


async def test_what_was_learned_is_shown_with_the_engine(http: httpx.AsyncClient) -> None:
    await made(http)
    shown = (await http.get("/engines/alpha")).json()
    assert [way["parks"] for way in shown["learned"]["ways"]] == [2, 1]
    [line] = [line for line in engine_lines(shown) if line.startswith("learned:")]
    assert (
        "kv_cache NONE: frees 512MiB, keeps 512MiB (256MiB in its first park), park 500ms, wake 250ms, 2 parks" in line
    )


async def test_a_loan_shows_what_was_predicted_beside_what_happened(http: httpx.AsyncClient, store: Store) -> None:
    node = await made(http)
    body = {"argv": ["true"], "hbm_bytes": 3 * GIB // 2}
    assert (await http.post("/jobs", json=body)).status_code == 201
    await store.lead("test", 60, take_over=True)
    assert await store.commit(decide(await store.load_snapshot(1.0), 1.0), 1.0) >= 1
    [order] = [
        one.order for one in await store.orders_after(node.node_id, node.after) if isinstance(one.order, OpenLoan)
    ]
    at = {LoanStep.PARK_SENT: 10.0, LoanStep.SETTLED: 10.75, LoanStep.RESUME_SENT: 20.0, LoanStep.VERIFIED: 21.5}
    steps = [
        LoanStepTaken(
            loan_id=order.loan_id,
            step=step,
            engine_id="node-1-alpha",
            monotonic_seconds=seconds,
            data={"freed_bytes": {DEVICE: GIB // 2}} if step is LoanStep.SETTLED else {},
        ).model_dump(mode="json")
        for step, seconds in at.items()
    ]
    before = (await http.get(f"/loans/{order.loan_id}")).json()
    assert before["plans"][0]["happened"] is None
    await node.report(*steps)
    loan = (await http.get(f"/loans/{order.loan_id}")).json()
    [plan] = loan["plans"]
    assert (plan["tags"], plan["whole"]) == (["kv_cache"], False)
    freed = {DEVICE: GIB // 2}
    assert plan["predicted"] == {"freed_bytes": freed, "park_seconds": 0.5, "wake_seconds": 0.25}
    assert plan["happened"] == {"freed_bytes": freed, "park_seconds": 0.75, "wake_seconds": 1.5}
    assert loan_plan_lines(loan, {"node-1-alpha": "alpha"}) == [
        "plan of alpha: kv_cache",
        f"  predicted  512MiB on {DEVICE} freed; park 500ms, wake 250ms",
        f"  happened   512MiB on {DEVICE} freed; park 750ms, wake 1.5s",
    ]


async def test_an_engine_that_is_parked_with_it_is_named(
    http: httpx.AsyncClient, live_url: str, token: str, tmp_path: Path, store: Store
) -> None:
    node = WireNode(http)
    beside = node.engine("beta")
    node.engines = (learning(node), beside)
    await node.register()
    await node.report({"kind": "device_observed", "device_id": DEVICE, "index": 0, "device_kind": "host_discrete",
                       "capacity_bytes": 3 * GIB, "free_bytes": GIB})  # fmt: skip
    environ = cli_environ(tmp_path, live_url, token)
    shown = await asyncio.to_thread(run_here, ("engine", "plan", "alpha", "--hbm", "3GiB"), environ)
    assert shown.returncode == 0, shown.stderr
    assert "with beta: " in shown.stdout
    assert beside.engine.engine_id not in shown.stdout
    body = {"argv": ["true"], "hbm_bytes": 3 * GIB}
    assert (await http.post("/jobs", json=body)).status_code == 201
    await store.lead("test", 60, take_over=True)
    assert await store.commit(decide(await store.load_snapshot(1.0), 1.0), 1.0) >= 1
    [loan] = (await http.get("/loans")).json()["items"]
    lent = await asyncio.to_thread(run_here, ("loan", "show", loan["id"]), environ)
    assert lent.returncode == 0, lent.stderr
    [engines] = [line for line in lent.stdout.splitlines() if line.startswith("engines:")]
    assert sorted(engines.removeprefix("engines:").replace(",", " ").split()) == ["alpha", "beta"]
    assert "plan of beta: " in lent.stdout
