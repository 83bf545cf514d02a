"""What is a webhook's own: who signed, which address is connected to, and answers that say less than was asked."""

from __future__ import annotations

import ipaddress
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trustme

from lull.agents.gates.addresses import refusal
from lull.agents.gates.base import ClosedTerms, Gate, GateRefused, GateUnreachable
from lull.agents.gates.counting import Counter
from lull.agents.gates.webhook import WebhookGate
from lull.agents.gates.webhook_call import signature
from lull.agents.protocol.wire import GateState
from tests.gates.rigs import ENGINE_ID, RIGS, WebhookRig, gate_rig
from tests.gates.webhook_server import WebhookServer


@pytest.fixture
async def rig() -> AsyncIterator[WebhookRig]:
    async with gate_rig(RIGS["webhook"]) as made:
        yield made


async def close(gate: Gate) -> int | None:
    return await gate.close(ENGINE_ID, ClosedTerms("hold", 7, 60.0))


def names(*addresses: str) -> Callable[[str, int], Any]:
    async def resolve(host: str, port: int) -> list[str]:
        return list(addresses)

    return resolve


def test_the_signature_is_what_the_page_says() -> None:
    """Computed by: printf 'v1.1760000000.abc.{}' | openssl dgst -sha256 -hmac 0123456789abcdef"""
    assert signature(b"0123456789abcdef", 1760000000, "abc", b"{}") == (
        "t=1760000000,id=abc,v1=64324e7ed249ffc36f4a40ce756b36dbd471237081b8441f2066cb31e7a21a1d"
    )


async def test_a_call_says_what_and_with_which_terms(rig: WebhookRig) -> None:
    gate = await rig.routed()
    await close(gate)
    ensure, closed = rig.server.calls
    assert (ensure["verb"], ensure["engine"], ensure["upstream"]) == ("ensure", "alpha", rig.engine.url)
    assert closed["verb"] == "close"
    assert closed["engine_id"] == ENGINE_ID
    assert closed["terms"] == {
        "gate": "hold",
        "hold_requests_max": 7,
        "hold_seconds_max": 60.0,
        "retry_after_seconds": None,
    }
    assert rig.server.refused == []
    assert len({call["id"] for call in rig.server.calls}) == 2


async def test_another_secret_is_refused_by_the_receiver(rig: WebhookRig) -> None:
    (rig.folder / "secret").write_bytes(b"another secret, long enough")
    with pytest.raises(GateRefused, match="HTTP 401: wrong signature"):
        await close(rig.gate())
    (rig.folder / "secret").write_bytes(b"short")
    with pytest.raises(GateRefused, match=r"secret_file .* shorter than 16 bytes"):
        await close(rig.gate())
    (rig.folder / "secret").unlink()
    with pytest.raises(GateRefused, match="secret_file"):
        await close(rig.gate())


async def test_only_what_is_said_is_so(rig: WebhookRig) -> None:
    gate = rig.gate()
    rig.server.says_nothing = True
    assert (await gate.observe(ENGINE_ID)).state is GateState.UNKNOWN
    with pytest.raises(GateUnreachable, match="asked for closed and says unknown"):
        await close(gate)
    rig.server.says_nothing = False
    await gate.open(ENGINE_ID)
    rig.server.lies = True
    await close(gate)  # it says closed, and the next look finds otherwise
    assert (await gate.observe(ENGINE_ID)).state is GateState.OPEN
    with pytest.raises(GateUnreachable, match="asked for closed and says open"):
        await gate.wait_drained(ENGINE_ID, 1)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"not JSON",
        b'{"state": "closed"}',  # nobody's answer
        b'{"id": "of another call", "state": "closed", "in_flight": 0}',
        b'{"id": "x", "pad": "' + b"x" * 70_000 + b'"}',
    ],
)
async def test_an_answer_that_is_none_of_ours_is_none(rig: WebhookRig, answer: bytes) -> None:
    rig.server.answer = answer
    with pytest.raises(GateUnreachable):
        await rig.gate().observe(ENGINE_ID)


@pytest.mark.parametrize("count", [-1, "0", 1.5, True, [], 1 << 40])
async def test_a_count_that_is_none_is_not_zero(rig: WebhookRig, count: Any) -> None:
    rig.server.in_flight = count
    with pytest.raises(GateUnreachable, match="in_flight is no count"):
        await rig.gate().observe(ENGINE_ID)


async def test_without_a_count_others_count_or_nobody_does(rig: WebhookRig) -> None:
    rig.server.in_flight = None
    await close(rig.gate())
    with pytest.raises(GateRefused, match="does not say in_flight"):
        await rig.gate().wait_drained(ENGINE_ID, 1)
    section = rig.section()
    gate = WebhookGate(section, "alpha", Counter(rig.engine.url, "vllm", section))
    assert gate.counted_by == "gate"
    rig.engine.running = 1
    assert await gate.wait_drained(ENGINE_ID, 0.2) == 1
    rig.engine.running = 0
    assert await gate.wait_drained(ENGINE_ID, 5) == 0
    assert gate.counted_by == "engine"


async def test_a_redirect_is_not_followed(rig: WebhookRig) -> None:
    other = await WebhookServer().start()
    try:
        rig.server.redirects_to = f"http://127.0.0.1:{other.port}/gate"
        with pytest.raises(GateUnreachable, match="HTTP 307"):
            await close(rig.gate())
        assert other.hosts == []
    finally:
        await other.stop()


@pytest.mark.parametrize("status", [400, 404, 408, 429, 500, 503])
async def test_what_is_no_yes_is_an_error(rig: WebhookRig, status: int) -> None:
    rig.server.status = status
    wanted = GateRefused if status in (400, 404) else GateUnreachable
    with pytest.raises(wanted, match=f"HTTP {status}"):
        await close(rig.gate())


# ---- addresses ------------------------------------------------------------------------------------------------------

EVERYWHERE = ["0.0.0.0/0", "::/0"]


@pytest.mark.parametrize(
    ("address", "allowed", "says"),
    [
        ("10.0.0.7", ["10.0.0.0/8"], None),
        ("127.0.0.1", ["127.0.0.0/8"], None),
        ("::1", ["::1/128"], None),
        ("2001:db8::7", ["2001:db8::/32"], None),
        ("11.0.0.7", ["10.0.0.0/8"], "in no network"),
        ("127.0.0.1", ["10.0.0.0/8"], "in no network"),
        ("2001:db9::7", ["10.0.0.0/8"], "in no network"),
        ("169.254.169.254", EVERYWHERE, "metadata"),
        ("169.254.1.1", EVERYWHERE, "link-local"),
        ("fe80::1", EVERYWHERE, "link-local"),
        ("fd00:ec2::254", EVERYWHERE, "metadata"),
        ("100.100.100.200", EVERYWHERE, "metadata"),
        ("168.63.129.16", EVERYWHERE, "metadata"),
        ("::ffff:169.254.169.254", EVERYWHERE, "metadata"),
        ("::ffff:10.0.0.7", ["10.0.0.0/8"], None),
        ("64:ff9b::a9fe:a9fe", EVERYWHERE, "metadata"),
        ("64:ff9b::a00:7", ["10.0.0.0/8"], None),
        ("2002:a9fe:a9fe::1", EVERYWHERE, "metadata"),
        ("0.0.0.0", EVERYWHERE, "no address of a host"),
        ("224.0.0.1", EVERYWHERE, "no address of a host"),
        ("255.255.255.255", EVERYWHERE, "no address of a host"),
    ],
)
def test_an_address_is_allowed_or_refused(address: str, allowed: list[str], says: str | None) -> None:
    refused = refusal(ipaddress.ip_address(address), [ipaddress.ip_network(one) for one in allowed])
    if says is None:
        assert refused is None
    else:
        assert refused is not None
        assert says in refused


async def test_a_name_with_one_bad_address_is_not_called(rig: WebhookRig) -> None:
    section = rig.section()
    for addresses in (["169.254.169.254"], ["127.0.0.1", "169.254.169.254"], ["10.0.0.1"]):
        gate = WebhookGate(section, "alpha", None, names(*addresses))
        with pytest.raises(GateRefused, match=r"webhook\.allow: .* is not called"):
            await close(gate)
    assert rig.server.hosts == []
    with pytest.raises(GateUnreachable, match="has no address"):
        await close(WebhookGate(section, "alpha", None, names()))


async def test_the_checked_address_is_the_one_that_is_connected_to(rig: WebhookRig) -> None:
    """A name that nothing else resolves: it is looked up once, its certificate is the name's, and so is its Host."""
    ca = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("gates.invalid").configure_cert(context)
    ca.cert_pem.write_to_path(str(rig.folder / "ca.pem"))
    looked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        looked.append(host)
        return ["127.0.0.1"] if len(looked) == 1 else ["127.0.0.9"]  # rebinding: a second look would go astray

    server = await WebhookServer().start(context)
    fields = {"ca_file": rig.folder / "ca.pem", "call_seconds_max": 5.0}
    try:
        section = rig.section(url=f"https://gates.invalid:{server.port}/gate", **fields)
        await close(WebhookGate(section, "alpha", None, resolve))
        assert looked == ["gates.invalid"]
        assert server.hosts == [f"gates.invalid:{server.port}"]
        section = rig.section(url=f"https://other.invalid:{server.port}/gate", **fields)
        with pytest.raises(GateUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
            await close(WebhookGate(section, "alpha", None, names("127.0.0.1")))
        assert len(server.calls) == 1
    finally:
        await server.stop()


async def test_what_the_other_side_says_is_not_passed_on(rig: WebhookRig) -> None:
    """Bodies of whatever answers there stay there; a detail in JSON is bounded."""
    rig.server.status = 400
    with pytest.raises(GateRefused) as caught:
        await close(rig.gate())
    assert re.search("out of order", str(caught.value))
    assert len(json.dumps(str(caught.value))) < 500
