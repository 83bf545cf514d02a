"""What the agent relies on with every adapter, whatever its engine: asked once, known again by the next agent, and
never taken for parked on the strength of an answer that does not say so."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lull.agents.engines.base import EngineAdapter, Observation
from lull.agents.errors import AgentError, EngineAuthRefused, EngineRefused, EngineTimedOut, EngineUnreachable
from lull.agents.protocol.capabilities import refusal
from lull.agents.protocol.policy import CanaryPolicy, EnginePolicy
from lull.agents.protocol.wire import EngineState
from lull.vmm.tags import RestoreMode
from tests.agent_node import free_port
from tests.engines.no_descriptors import no_descriptors
from tests.engines.rigs import KINDS, KV_MIB, WEIGHTS_MIB, Kind, Rig
from tests.recording_engine import RecordingEngine
from tests.waiting import wait_until_async

CANARY = CanaryPolicy(deadline_seconds=10)
CALL_SECONDS = 10.0
QUICK_KINDS = [kind for kind in KINDS if kind.name in ("vllm 0.33", "sglang", "process", "cuda-checkpoint")]
MORE_KINDS = [kind for kind in KINDS if kind not in QUICK_KINDS]
ONE_OF_EACH = [next(kind for kind in KINDS if kind.kind == name) for name in dict.fromkeys(k.kind for k in KINDS)]


def _name(kind: Kind) -> str:
    return kind.name


async def settled(rig: Rig, *states: EngineState) -> Observation:
    seen: list[Observation] = []

    async def look() -> bool:
        seen.append(await rig.adapter().observe())
        return seen[-1].state in states

    await wait_until_async(look, 10, f"{rig.kind.name} in {states}, {seen[-1:]}")
    return seen[-1]


@pytest.mark.parametrize(
    "kind", [*QUICK_KINDS, *(pytest.param(kind, marks=pytest.mark.long) for kind in MORE_KINDS)], ids=_name
)
async def test_parks_wakes_and_is_known_again_by_the_next_agent(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line asks an adapter of its own: all that one knows is written down or told by the engine."""
    rig = Rig(kind, tmp_path)
    for name, value in rig.cuda_environment().items():
        monkeypatch.setenv(name, value)
    policy = rig.settings.policy
    try:
        await _start(rig)
        capabilities = await rig.adapter().capabilities()
        assert refusal(capabilities, policy) is None
        assert (await rig.adapter().observe()).state is EngineState.RUNNING
        full = await rig.held_mib()
        assert full >= WEIGHTS_MIB + KV_MIB
        golden = await rig.adapter().answer(CANARY)
        # It is asked for as many tokens as the policy says: fewer are the beginning of the same answer.
        fewer = await rig.adapter().answer(CANARY.model_copy(update={"tokens": CANARY.tokens // 2}))
        assert 0 < len(fewer.text) < len(golden.text)
        assert golden.text.startswith(fewer.text)

        # Found running, nothing is left to do; and nothing is done to it.
        await rig.adapter().after_resume(policy, CALL_SECONDS)
        assert await rig.adapter().answer(CANARY) == golden

        for _ in range(2):
            await rig.adapter().park(policy, CALL_SECONDS)
            seen = await settled(rig, EngineState.PARKED)
            assert set(policy.restore_modes) <= set(seen.parked_tags)
            await wait_until_async(lambda: _is(rig, kind.stays_mib), 5, "what it parked is free")
            await rig.adapter().resume(policy, CALL_SECONDS)
            await settled(rig, EngineState.RUNNING)
            await rig.adapter().after_resume(policy, CALL_SECONDS)
            assert await rig.held_mib() == full
            assert await rig.adapter().answer(CANARY) == golden

        # It is ended while it is parked, and started again: what was written down is about another process.
        await rig.adapter().park(policy, CALL_SECONDS)
        await settled(rig, EngineState.PARKED)
        await rig.stop()
        await _start(rig)
        assert await rig.adapter().answer(CANARY) == golden
    finally:
        await rig.stop()


async def _start(rig: Rig) -> None:
    """As its keeper does: one that comes up parked is woken."""
    await rig.start()
    if rig.kind.starts_parked:
        await settled(rig, EngineState.PARKED)
        await rig.adapter().resume(rig.settings.policy, CALL_SECONDS)
    await settled(rig, EngineState.RUNNING)


async def _is(rig: Rig, mib: float) -> bool:
    return await rig.held_mib() == mib


# ---- servers that are not what they should be -------------------------------------------------------------------

ODD_REPLIES = {
    "not JSON": (200, b"<html>hello</html>"),
    "a list": (200, b"[]"),
    "an object of another": (200, b'{"models": 3, "status": "sleeping"}'),
    "numbers": (200, b'{"is_sleeping": 1, "state": 4, "models": [4]}'),
    "not found": (404, b'{"detail": "Not Found"}'),
    "an error": (500, b"Internal Server Error"),
    "elsewhere": (307, b""),
    "too early": (503, b'{"error": {"message": "starting"}}'),
}


@asynccontextmanager
async def server(reply: tuple[int, bytes] | None) -> AsyncIterator[int]:
    """Answers everything with ``reply``; None: takes the request and never answers."""
    ends: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        if reply is None:
            return
        status, body = reply
        head = f"HTTP/1.1 {status} Odd\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for writer in ends:
            writer.close()


class Elsewhere(Rig):
    """Its adapters speak to another server; the process is this one, so a ledger has somebody to be about."""

    @property
    def incarnation(self) -> str | None:
        return "boot:1:1"


def adapter_at(kind: Kind, root: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> EngineAdapter:
    rig = Elsewhere(kind, root)
    adapter = rig.adapter(rig.settings_at(port))
    name = "vllm" if kind.kind == "vllm-metal" else kind.kind.replace("-", "_")
    module = importlib.import_module(f"lull.agents.engines.{name}")
    monkeypatch.setattr(module, "STATUS_SECONDS" if name == "vllm" else "_STATUS_SECONDS", 0.2)
    return adapter


ASKED = [kind for kind in ONE_OF_EACH if kind.asks]
# Their key is for the canary.
ASKED_WITHOUT_A_KEY = ("vllm", "vllm-metal")
# What a file of a key may hold while it is rotated, or by mistake.
NO_KEYS = (b"", b" \n", b"old\nnew\n", "schlüssel".encode(), b"\xff\xfekey", b"a" * (1 << 20))


@pytest.mark.parametrize("kind", ASKED, ids=_name)
async def test_an_odd_server_is_never_taken_for_parked(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (name, reply) in enumerate(ODD_REPLIES.items()):
        root = tmp_path / str(number)
        root.mkdir()
        async with server(reply) as port:
            adapter = adapter_at(kind, root, port, monkeypatch)
            seen = await adapter.observe()
            assert seen.state is not EngineState.PARKED, (name, seen)
            if reply[0] != 200:
                assert not await adapter.healthy(), name
                with pytest.raises(AgentError):
                    await adapter.park(EnginePolicy(), 1)
            with pytest.raises(AgentError):
                await adapter.answer(CANARY)
            assert (await adapter.observe()).state is not EngineState.PARKED, name


@pytest.mark.parametrize("kind", ASKED, ids=_name)
async def test_nobody_there_is_unreachable_and_nothing_was_asked(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = adapter_at(kind, tmp_path, free_port(), monkeypatch)
    assert not await adapter.healthy()
    seen = await adapter.observe()
    assert (seen.state, seen.is_our_fault) == (EngineState.UNREACHABLE, False)
    with pytest.raises(EngineUnreachable):
        await adapter.park(EnginePolicy(), 1)
    with pytest.raises(EngineUnreachable):
        await adapter.answer(CANARY)
    assert (await adapter.observe()).state is EngineState.UNREACHABLE


@pytest.mark.parametrize("kind", ASKED, ids=_name)
async def test_silence_is_bounded_and_proves_nothing(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(None) as port:
        adapter = adapter_at(kind, tmp_path, port, monkeypatch)
        async with asyncio.timeout(20):
            assert not await adapter.healthy()
            assert (await adapter.observe()).state is EngineState.UNREACHABLE
            with pytest.raises(EngineTimedOut):
                await adapter.park(EnginePolicy(), 0.3)
            with pytest.raises(EngineTimedOut):
                await adapter.answer(CanaryPolicy(deadline_seconds=0.3))
        assert (await adapter.observe()).state is not EngineState.PARKED


@pytest.mark.parametrize("kind", ASKED, ids=_name)
async def test_a_wrong_key_is_our_fault_and_said_so(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server((401, b'{"error": "Unauthorized"}')) as port:
        adapter = adapter_at(kind, tmp_path, port, monkeypatch)
        seen = await adapter.observe()
        assert (seen.state, seen.is_our_fault) == (EngineState.UNREACHABLE, True)
        with pytest.raises(EngineAuthRefused):
            await adapter.park(EnginePolicy(), 1)


@pytest.mark.parametrize("kind", ONE_OF_EACH, ids=_name)
async def test_the_canary_is_sent_with_the_key_as_it_stands_in_its_file(tmp_path: Path, kind: Kind) -> None:
    engine = await RecordingEngine().start()
    key = tmp_path / "api.key"
    rig = Elsewhere(kind, tmp_path)
    adapter = rig.adapter(rig.settings_at(engine.port).model_copy(update={"api_key_file": key}))
    try:
        for text in ("first", "rotated"):
            key.write_text(text + "\n")
            with pytest.raises(EngineRefused, match="odd"):  # it only sends back what it was sent
                await adapter.answer(CANARY)
            assert engine.arrivals[-1].headers["Authorization"] == f"Bearer {text}"
        key.unlink()
        asked = len(engine.arrivals)
        for content in (None, *NO_KEYS):
            if content is not None:
                key.write_bytes(content)
            with pytest.raises(EngineAuthRefused, match=str(key)):
                await adapter.answer(CANARY)
        assert len(engine.arrivals) == asked
    finally:
        await engine.stop()


@pytest.mark.parametrize("kind", ASKED, ids=_name)
async def test_a_key_file_that_holds_no_key_is_our_fault_and_nothing_is_sent(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one is for a moment while it is rotated."""
    async with server((200, b"{}")) as port:
        rig = Elsewhere(kind, tmp_path)
        settings = rig.settings_at(port)
        adapter = rig.adapter(settings.model_copy(update={"api_key_file": rig.key_file}))
        told = await adapter.observe()
        for content in (b"", b" \n") if kind.signs else NO_KEYS:
            rig.key_file.write_bytes(content)
            seen = await adapter.observe()
            if kind.kind in ASKED_WITHOUT_A_KEY:
                assert seen == told
            else:
                assert (seen.state, seen.is_our_fault) == (EngineState.UNREACHABLE, True), content
                assert str(rig.key_file) in seen.detail


# ---- nothing else leaves an adapter ------------------------------------------------------------------------------

_DEEP = b'{"a":' * 60_000
_ODD_VALUES = {
    **{name: [None] for name in ("is_sleeping", "state", "version", "status", "message", "success", "response")},
    **dict.fromkeys(("paths", "parked_tags", "model_path", "data", "models", "server_args"), 3),
    "choices": [{"text": None, "logprobs": {"token_logprobs": [{}]}}],
    "error": {"message": [3]},
}
_ODD_METRICS = b"vllm:num_requests_running 1.2.3\nvllm:num_requests_waiting 1e999\n"
BODIES = {
    "deep": _DEEP,
    "odd values": json.dumps(_ODD_VALUES).encode(),
    "no values": json.dumps(dict.fromkeys(_ODD_VALUES)).encode(),
    "metrics": _ODD_METRICS,
    "no text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("kind", ASKED, ids=_name)
async def test_whatever_it_answers_a_look_ends_and_a_call_fails_as_an_engine_s(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anything else that is raised ends the agent."""
    for number, (name, body) in enumerate(BODIES.items()):
        for status in (200, 500):
            root = tmp_path / f"{number}.{status}"
            root.mkdir()
            async with server((status, body)) as port:
                adapter = adapter_at(kind, root, port, monkeypatch)
                await _asked_all(adapter, name)


async def _asked_all(adapter: EngineAdapter, why: str) -> None:
    policy = EnginePolicy()
    asked: list[Callable[[], Awaitable[object]]] = [
        adapter.capabilities,
        lambda: adapter.park(policy, 0.2),
        lambda: adapter.resume(policy, 0.2),
        lambda: adapter.after_resume(policy, 0.2),
        lambda: adapter.answer(CANARY),
    ]
    for ask in asked:
        await adapter.healthy()
        assert isinstance(await adapter.observe(), Observation), why
        with contextlib.suppress(AgentError):
            await ask()
    assert isinstance(await adapter.observe(), Observation), why


@pytest.mark.parametrize("kind", ONE_OF_EACH, ids=_name)
async def test_without_descriptors_a_look_ends_and_says_nothing_of_the_engine(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server((200, b"{}")) as port:
        rig = Elsewhere(kind, tmp_path)
        for name, value in rig.cuda_environment().items():
            monkeypatch.setenv(name, value)
        adapter = rig.adapter(rig.settings_at(port))
        await adapter.observe()  # as an agent that has run for a while
        with no_descriptors():
            seen = await adapter.observe()
            await adapter.healthy()
        assert (seen.state, seen.is_our_fault) == (EngineState.UNREACHABLE, True)
        await adapter.aclose()


# ---- policies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ONE_OF_EACH, ids=_name)
async def test_what_cannot_be_honoured_is_refused_with_the_nearest_that_can(tmp_path: Path, kind: Kind) -> None:
    from lull.agents.protocol.engine_kinds import known_capabilities

    capabilities = known_capabilities(kind.kind)
    wanted: dict[str, Any] = {"model_weights": RestoreMode.MEMSET, "drafter": RestoreMode.NONE}
    said = refusal(capabilities, EnginePolicy(restore_modes=wanted))
    if said is None:
        assert kind.kind == "command"
        return
    text = said.partition("restore_modes = { ")[2].partition(" }")[0]
    near = {tag: mode.strip('"') for tag, _, mode in (part.partition(" = ") for part in text.split(", "))}
    assert refusal(capabilities, EnginePolicy.model_validate({"restore_modes": near})) is None, said
