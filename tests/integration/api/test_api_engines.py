from __future__ import annotations

from typing import Any

import httpx
import pytest

from lull.agents.protocol.capabilities import Capabilities, ParkPlan
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import OrderAnswer, PolicyRefused, SetPolicy
from lull.cli.engine import engine_lines
from lull.cli.engine_policy import policy_lines
from lull.scheduler.store import Store
from lull.vmm.tags import RestoreMode
from tests.wire_node import GIB, WireNode


@pytest.fixture
async def node(http: httpx.AsyncClient) -> WireNode:
    made = WireNode(http)
    made.engines = (
        made.engine("alpha"),
        made.engine("beta", locked=True),
        made.engine("gamma", supervised=False),
    )
    await made.register()
    return made


def _policy(**fields: Any) -> dict[str, Any]:
    return {**EnginePolicy(when="always").model_dump(mode="json"), **fields}


async def test_engines_are_listed_and_shown_by_id_and_name(http: httpx.AsyncClient, node: WireNode) -> None:
    items = (await http.get("/engines")).json()["items"]
    assert sorted(engine["name"] for engine in items) == ["alpha", "beta", "gamma"]
    by_name = (await http.get("/engines/alpha")).json()
    assert by_name == (await http.get("/engines/node-1-alpha")).json()
    assert (by_name["state"], by_name["gate"], by_name["verified"]) == ("running", "open", True)
    assert by_name["device_bytes"] == {"node-1-device-0": GIB}
    missing = await http.get("/engines/nope")
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")


async def test_a_policy_has_an_etag_and_is_replaced_against_it(http: httpx.AsyncClient, node: WireNode) -> None:
    read = await http.get("/engines/alpha/policy")
    etag = read.headers["etag"]
    assert etag == f'"{read.json()["version"]}"'
    written = await http.put("/engines/alpha/policy", json=_policy(gate="refuse"), headers={"If-Match": etag})
    assert written.status_code == 200, written.text
    assert written.json()["policy"]["gate"] == "refuse"
    assert written.headers["etag"] != etag
    lost = await http.put("/engines/alpha/policy", json=_policy(), headers={"If-Match": etag})
    assert (lost.status_code, lost.json()["code"]) == (412, "version_mismatch")
    assert lost.headers["etag"] == written.headers["etag"]
    for match in ({"If-Match": f"W/{written.headers['etag']}"}, {}, {"If-Match": "*"}):
        again = await http.put("/engines/node-1-alpha/policy", json=_policy(), headers=match)
        assert again.status_code == 200, match
    bad = await http.put("/engines/alpha/policy", json=_policy(), headers={"If-Match": "three"})
    assert (bad.status_code, bad.json()["errors"][0]["field"]) == (422, "If-Match")


async def test_a_policy_whose_answer_was_lost_may_be_put_again(
    http: httpx.AsyncClient, node: WireNode, store: Store
) -> None:
    """The version that it was put against is over by its own doing: nobody else was first."""
    etag = (await http.get("/engines/alpha/policy")).headers["etag"]
    twice = [
        await http.put("/engines/alpha/policy", json=_policy(gate="refuse"), headers={"If-Match": etag}) for _ in "12"
    ]
    assert [answer.status_code for answer in twice] == [200, 200]
    assert twice[0].headers["etag"] == twice[1].headers["etag"] != etag
    assert len(await store.orders_after(node.node_id, node.after)) == 1


async def test_the_agent_is_told_of_the_new_policy(http: httpx.AsyncClient, node: WireNode, store: Store) -> None:
    await http.put("/engines/alpha/policy", json=_policy(settle_samples=7))
    orders = [envelope.order for envelope in await store.orders_after(node.node_id, node.after)]
    assert [order.kind for order in orders if order] == ["set_policy"]
    events = (await http.get("/events", params={"follow": 0})).json()["items"]
    assert [event["actor"] for event in events if event["engine_id"] == "node-1-alpha"][-1] == "operator"


async def test_a_locked_policy_is_409(http: httpx.AsyncClient, node: WireNode) -> None:
    answer = await http.put("/engines/beta/policy", json=_policy())
    assert (answer.status_code, answer.json()["code"]) == (409, "policy_locked")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"recall_waiting_seconds": 5}, "recall_waiting_seconds: this version does not do recalling a loan"),
        ({"when": "idle"}, "when: 'idle' is not obeyed yet; use 'manual' or 'always'"),
        ({"restore_modes": {"model_weights": "NONE"}}, "loses the weights"),
        ({"restore_modes": {"model_weights": "RAM"}}, "restore_modes.model_weights: input should be 'CPU'"),
        ({"restore_modes": {"Model": "CPU"}}, "a tag is lower-case letters"),
        ({"restore_modes": {"_no_capture_init_kv_cache": "CPU"}}, "cannot be released"),
        ({"drain_second_max": 5}, "drain_second_max: unknown field; did you mean 'drain_seconds_max'?"),
        ({"hold_seconds_max": 0}, "hold_seconds_max: input should be greater than 0"),
        ({"canary": {"promt": "x"}}, "promt"),
    ],
)
async def test_a_policy_that_is_not_obeyed_is_422(
    http: httpx.AsyncClient, node: WireNode, fields: dict[str, Any], says: str
) -> None:
    before = (await http.get("/engines/alpha/policy")).json()
    answer = await http.put("/engines/alpha/policy", json=_policy(**fields))
    assert answer.status_code == 422
    assert says in answer.json()["detail"]
    assert (await http.get("/engines/alpha/policy")).json() == before


async def test_a_policy_is_judged_by_what_the_engine_says_it_can_do(
    http: httpx.AsyncClient, node: WireNode, store: Store
) -> None:
    """Version, routes and flags of the very process: the nearest policy that it can honour is named."""
    level_1 = ParkPlan(
        name="level 1", modes={"model_weights": [RestoreMode.CPU, RestoreMode.PINNED], "kv_cache": [RestoreMode.NONE]}
    )
    able = Capabilities(engine="vLLM 0.33.0", version="0.33.0", plans=[level_1], can_reload_weights=True)
    engine = node.engine("alpha").engine.model_copy(update={"engine_kind": "vllm", "capabilities": able})
    assert (await node.report(engine.model_dump(mode="json"))).status_code == 200
    assert (await http.get("/engines/alpha")).json()["capabilities"]["version"] == "0.33.0"

    lost = {"model_weights": "NONE", "kv_cache": "NONE"}
    refused = await http.put("/engines/alpha/policy", json=_policy(restore_modes=lost))
    assert (refused.status_code, refused.json()["code"]) == (422, "policy_not_honoured")
    near = 'the nearest policy that it can honour: restore_modes = { model_weights = "CPU", kv_cache = "NONE" }'
    assert near in refused.json()["detail"]
    pinned = {"model_weights": "PINNED", "kv_cache": "NONE"}
    assert (await http.put("/engines/alpha/policy", json=_policy(restore_modes=pinned))).status_code == 200

    # An agent that started again has not asked it yet; then it finds that it cannot be parked at all.
    assert (await node.report(engine.model_copy(update={"capabilities": None}).model_dump(mode="json"))).is_success
    assert (await http.put("/engines/alpha/policy", json=_policy(restore_modes=lost))).status_code == 422
    unable = able.model_copy(update={"unsupported": "vLLM 0.33.0 cannot be parked: VLLM_SERVER_DEV_MODE=1"})
    told = engine.model_copy(update={"capabilities": unable})
    assert (await node.report(told.model_dump(mode="json"))).is_success
    refused = await http.put("/engines/alpha/policy", json=_policy(restore_modes={"kv_cache": "NONE"}))
    assert (refused.status_code, "VLLM_SERVER_DEV_MODE=1" in refused.json()["detail"]) == (422, True)
    # What decides on loans knows it too, so no job is sent to be refused there.
    [alpha] = [engine for engine in (await store.load_snapshot(0.0)).engines if engine.name == "alpha"]
    assert alpha.refused is not None
    assert "VLLM_SERVER_DEV_MODE=1" in alpha.refused
    # Its other terms may be set all the same.
    assert (await http.put("/engines/alpha/policy", json=_policy(restore_modes=pinned, gate="refuse"))).is_success


async def test_under_pressure_only_an_engine_sleeps_whose_gate_sees_the_request_that_wakes_it(
    http: httpx.AsyncClient, node: WireNode
) -> None:
    pressed = _policy(on_pressure=True, pressure_free_bytes_min=1)
    told = node.engine("alpha").engine
    for tells, status in ((False, 422), (None, 200), (True, 200)):
        changed = told.model_copy(update={"tells_requests": tells})
        assert (await node.report(changed.model_dump(mode="json"))).is_success
        assert (await http.get("/engines/alpha")).json().get("tells_requests") is tells
        answer = await http.put("/engines/alpha/policy", json=pressed)
        assert answer.status_code == status, answer.text
        if status == 422:
            assert (answer.json()["code"], answer.json()["errors"][0]["field"]) == (
                "policy_not_honoured",
                "on_pressure",
            )
            assert "does not see requests while it is closed" in answer.json()["detail"]
            assert (await http.put("/engines/alpha/policy", json=_policy(settle_samples=9))).status_code == 200
            parked = await http.post("/engines/alpha/park", json={})
            assert (parked.status_code, "--no-wake-on-request" in parked.json()["detail"]) == (409, True)


async def test_a_policy_that_its_agent_refuses_is_said_so_until_it_is_mended(
    http: httpx.AsyncClient, node: WireNode, store: Store
) -> None:
    await http.put("/engines/alpha/policy", json=_policy(settle_samples=7))
    [order] = await store.orders_after(node.node_id, node.after)
    why = "restore modes of an attached engine are fixed by whoever started it"
    refused = OrderAnswer(seq=order.seq, outcome="refused", detail=why)
    assert (await node.report(refused.model_dump(mode="json"))).is_success
    shown = (await http.get("/engines/alpha")).json()
    assert (shown["policy_version"], shown["policy_version_in_force"], shown["policy_refused"]) == (2, 0, why)
    assert f"policy refused: {why}" in [" ".join(line.split()) for line in engine_lines(shown)]
    policy = (await http.get("/engines/alpha/policy")).json()
    assert policy["refused"] == why
    assert f"# refused by its agent: {why}" in policy_lines(policy)
    events = (await http.get("/events", params={"follow": 0, "type": "order_refused"})).json()["items"]
    assert [event["engine_id"] for event in events] == ["node-1-alpha"]
    in_force = node.engine("alpha").engine.model_copy(update={"policy_version": 2})
    assert (await node.report(in_force.model_dump(mode="json"))).is_success
    assert (await http.get("/engines/alpha")).json().get("policy_refused") is None, "it is in force after all"
    await http.put("/engines/alpha/policy", json=_policy())
    assert (await http.get("/engines/alpha/policy")).json().get("refused") is None, "another one"


async def test_a_policy_that_was_refused_from_the_registration_s_list_is_said_so_and_may_be_asked_for_anew(
    http: httpx.AsyncClient, node: WireNode, store: Store
) -> None:
    wanted = _policy(settle_samples=7)
    await http.put("/engines/alpha/policy", json=wanted)
    assert [policy.version for policy in (await node.register()).policies if policy.engine_id == "node-1-alpha"] == [2]
    told = node.engine("alpha").engine
    refused = told.model_copy(update={"policy_refused": PolicyRefused(version=2, sentence="no room for that")})
    assert (await node.report(refused.model_dump(mode="json"))).is_success
    assert (await http.get("/engines/alpha")).json()["policy_refused"] == "no room for that"
    assert (await node.report(told.model_dump(mode="json"))).is_success
    assert (await http.get("/engines/alpha")).json()["policy_refused"] == "no room for that", "nothing new was said"

    late = await http.put("/engines/alpha/policy", json=wanted, headers={"If-Match": '"1"'})
    assert (late.status_code, late.json()["version"]) == (200, 2), "the answer to the first was lost"
    again = await http.put("/engines/alpha/policy", json=wanted)
    assert (again.status_code, again.json()["version"], again.json().get("refused")) == (200, 3, None)
    [order] = await store.orders_after(node.node_id, node.after)
    assert isinstance(order.order, SetPolicy)
    assert order.order.version == 3
    assert (await http.put("/engines/alpha/policy", json=wanted)).json()["version"] == 3, "it is under way"
    assert (await http.get("/engines/alpha")).json().get("policy_refused") is None


async def test_the_restore_modes_of_an_attached_engine_cannot_be_changed(
    http: httpx.AsyncClient, node: WireNode
) -> None:
    modes = {"model_weights": "PINNED", "kv_cache": "NONE"}
    answer = await http.put("/engines/gamma/policy", json=_policy(restore_modes=modes))
    assert (answer.status_code, answer.json()["code"]) == (422, "policy_not_honoured")
    assert "attached" in answer.json()["detail"]
    assert answer.json()["errors"][0]["field"] == "restore_modes"
    assert (await http.put("/engines/gamma/policy", json=_policy(gate="refuse"))).status_code == 200
    assert (await http.put("/engines/alpha/policy", json=_policy(restore_modes=modes))).status_code == 200
