"""What is Kubernetes' own: conflicts, controllers that lag, pods that are replaced, tokens that are rotated."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from lull.agents.errors import ConfigError
from lull.agents.gates import kubernetes_api
from lull.agents.gates.base import ClosedTerms, GateError, GateRefused, GateUnreachable
from lull.agents.gates.kubernetes_api import KubernetesApi
from lull.agents.gates.sections import KubernetesSection
from lull.agents.protocol.wire import GateState
from tests.gates.kubernetes_server import NAMESPACE, TOKEN, FakePod
from tests.gates.rigs import ENGINE_ID, RIGS, ConditionRig, KubernetesRig, gate_rig


@pytest.fixture
async def rig() -> AsyncIterator[KubernetesRig]:
    async with gate_rig(RIGS["kubernetes"]) as made:
        yield made


async def close(gate: Any) -> int | None:
    return await gate.close(ENGINE_ID, ClosedTerms("refuse", 0, 60.0))


async def test_each_patch_is_one_condition_or_one_label_on_the_version_that_was_read(rig: KubernetesRig) -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    gate = rig.made()
    gate._now = lambda: at
    await gate.open(ENGINE_ID)
    await close(gate)
    opened, labelled, closed, taken = rig.server.on_patch
    assert opened["status"]["conditions"] == [
        {
            "type": "lull.dev/serving",
            "status": "True",
            "reason": "EngineServes",
            "message": "set by lull: the engine is verified",
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        }
    ]
    assert closed["status"]["conditions"][0]["status"] == "False"
    assert labelled["metadata"]["labels"] == {"lull.dev/serving": "true"}
    assert taken["metadata"]["labels"] == {"lull.dev/serving": None}
    assert rig.pod.labels == {"app": "vllm"}  # nobody else's label was touched
    await close(gate)
    assert len(rig.server.on_patch) == 4  # what is so already is not patched


async def test_a_conflict_is_read_again_and_many_are_an_error(rig: KubernetesRig) -> None:
    gate = rig.gate()
    rig.server.conflicts = 2
    await gate.open(ENGINE_ID)
    assert (await gate.observe(ENGINE_ID)).state is GateState.OPEN
    rig.server.conflicts = 1000
    with pytest.raises(GateUnreachable, match="did not become closed in 5 tries"):
        await close(gate)
    rig.server.conflicts = 0
    await close(gate)


async def test_nothing_counts_as_closed_while_a_slice_lists_the_pod(rig: KubernetesRig) -> None:
    gate = rig.made(endpoint_seconds_max=0.3)
    await gate.open(ENGINE_ID)
    rig.server.lag_seconds = 3600.0
    with pytest.raises(GateUnreachable, match="service vllm still lists pod vllm-0 as ready"):
        await close(gate)
    assert (await gate.observe(ENGINE_ID)).state is GateState.UNKNOWN
    rig.server.follow()
    await close(gate)
    assert (await gate.observe(ENGINE_ID)).state is GateState.CLOSED
    with pytest.raises(GateUnreachable, match="does not list"):
        await gate.open(ENGINE_ID)


async def test_an_endpoint_without_a_word_counts_as_ready_and_is_found_on_any_page(rig: KubernetesRig) -> None:
    """The stand-in leaves `ready` out where it is true; the pod's slice comes after another one's."""
    rig.server.page_items = 1
    rig.server.pods = dict(reversed(rig.server.pods.items()))
    rig.server.follow()
    gate = rig.gate()
    await gate.open(ENGINE_ID)
    assert (await gate.observe(ENGINE_ID)).state is GateState.OPEN
    assert rig.server.later_pages > 0


async def test_who_follows_the_slices_is_given_time_once(rig: KubernetesRig) -> None:
    gate = rig.made(propagation_seconds=0.3)
    await gate.open(ENGINE_ID)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await close(gate)
    assert loop.time() - began >= 0.3
    began = loop.time()
    await close(gate)
    assert loop.time() - began < 0.3


async def test_a_pod_that_is_replaced_is_closed_until_it_is_opened(rig: KubernetesRig) -> None:
    gate = rig.gate()
    await gate.open(ENGINE_ID)
    rig.server.add(FakePod("vllm-0", "uid-9", {"app": "vllm"}, ["lull.dev/serving"]))
    assert (await gate.observe(ENGINE_ID)).state is GateState.CLOSED
    await gate.open(ENGINE_ID)
    assert (await gate.observe(ENGINE_ID)).state is GateState.OPEN


async def test_a_pod_whose_own_probes_say_no_is_not_open(rig: KubernetesRig) -> None:
    gate = rig.made(endpoint_seconds_max=0.2)
    rig.pod.containers_ready = False
    with pytest.raises(GateUnreachable, match="does not list"):
        await gate.open(ENGINE_ID)
    assert (await gate.observe(ENGINE_ID)).state is GateState.UNKNOWN


async def test_a_pod_without_the_readiness_gate_is_refused() -> None:
    async with gate_rig(ConditionRig) as rig:
        rig.pod.readiness_gates.clear()
        with pytest.raises(GateRefused, match=r"has no readiness gate lull\.dev/serving"):
            await rig.routed()


async def test_a_selector_finds_one_pod_on_the_node_or_is_refused(rig: KubernetesRig) -> None:
    by_selector = {"pod": None, "pod_selector": "app=vllm"}
    with pytest.raises(GateRefused, match="finds 2 pods \\(other-0, vllm-0\\), not one"):
        await rig.made(**by_selector).open(ENGINE_ID)
    rig.server.pods["other-0"].node = "node-b"
    await rig.made(**by_selector, node="node-a").open(ENGINE_ID)
    assert rig.pod.ready
    rig.server.add(FakePod("vllm-1", "uid-3", {"app": "vllm"}, [], deleted=True))  # the one before, on its way out
    await close(rig.made(**by_selector, node="node-a"))
    with pytest.raises(GateRefused, match="finds 0 pods"):
        await rig.made(**by_selector, node="node-c").open(ENGINE_ID)


async def test_a_token_is_read_again_and_a_wrong_one_is_refused(rig: KubernetesRig) -> None:
    gate = rig.gate()
    await gate.open(ENGINE_ID)
    rig.server.token = "the next one"
    with pytest.raises(GateRefused, match="HTTP 401: Unauthorized"):
        await close(gate)
    (rig.folder / "token").write_text("the next one")
    await close(gate)
    for content in (b"", b"old\nnew\n", b"\xff\xfetoken"):
        (rig.folder / "token").write_bytes(content)
        with pytest.raises(GateRefused, match=r"the token .* (is empty|holds more than one line)"):
            await close(gate)
    (rig.folder / "token").unlink()
    with pytest.raises(GateRefused, match="cannot be read"):
        await close(gate)


@pytest.mark.parametrize("status", [403, 404, 422, 429, 500, 503])
async def test_what_is_no_yes_is_an_error(rig: KubernetesRig, status: int) -> None:
    gate = rig.gate()
    await gate.open(ENGINE_ID)
    rig.server.status = status
    wanted = GateRefused if status in (403, 404, 422) else GateUnreachable
    with pytest.raises(wanted, match=f"HTTP {status}: etcdserver"):
        await close(gate)
    with pytest.raises(GateError):
        await gate.observe(ENGINE_ID)


async def test_in_a_cluster_the_pod_tells_where_and_as_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTPS with the cluster's own CA, as a service account's files have it."""
    ca, other = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    seen: list[str] = []

    async def pod(request: web.Request) -> web.Response:
        seen.append(f"{request.path} {request.headers['Authorization']}")
        return web.json_response(FakePod("vllm-0", "u", {}, []).document())

    app = web.Application()
    app.router.add_get("/{path:.*}", pod)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    port = runner.addresses[0][1]
    for name, text in (("token", TOKEN), ("namespace", NAMESPACE + "\n")):
        (tmp_path / name).write_text(text)
    ca.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    other.cert_pem.write_to_path(str(tmp_path / "other.crt"))
    monkeypatch.setattr(kubernetes_api, "SERVICE_ACCOUNT", tmp_path)
    fields: dict[str, Any] = {"pod": "vllm-0", "services": ["vllm"], "condition": "lull.dev/serving"}
    try:
        with pytest.raises(ConfigError, match=r"kubernetes\.api_url"):
            KubernetesApi(KubernetesSection.model_validate(fields))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        assert (await KubernetesApi(KubernetesSection.model_validate(fields)).pod("vllm-0")).name == "vllm-0"
        assert seen == [f"/api/v1/namespaces/{NAMESPACE}/pods/vllm-0 Bearer {TOKEN}"]
        fields["ca_file"] = tmp_path / "other.crt"
        with pytest.raises(GateUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
            await KubernetesApi(KubernetesSection.model_validate(fields)).pod("vllm-0")
        assert len(seen) == 1
    finally:
        await runner.cleanup()
