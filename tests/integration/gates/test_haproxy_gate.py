"""What is HAProxy's own: cookies that outlive `drain`, several of them, reloads, and files that start it closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lull.agents.gates.base import ClosedTerms, GateRefused, GateUnreachable
from lull.agents.gates.gateway import GatewayGate
from lull.agents.gates.haproxy import HaproxyGate
from lull.agents.gates.haproxy_socket import RuntimeSocket, server_counts, server_states
from lull.agents.gates.sections import HaproxySection
from lull.agents.protocol.wire import GateState
from tests.agent_node import free_port
from tests.gates.haproxies import Haproxy
from tests.gates.metered_engine import MeteredEngine
from tests.gates.rigs import ENGINE_ID, RIGS, TwoHaproxiesRig, gate_rig
from tests.waiting import wait_until_async


@pytest.fixture
async def engine() -> AsyncIterator[MeteredEngine]:
    engine = await MeteredEngine().start()
    yield engine
    await engine.stop()


@contextmanager
def haproxy(sockets: Path, engine: MeteredEngine, **line: Any) -> Iterator[Haproxy]:
    one = Haproxy(sockets, free_port(), engine.port, **line).start()
    try:
        yield one
    finally:
        one.stop()


def gate_of(*haproxies: Haproxy, **more: Any) -> HaproxyGate:
    fields = {"sockets": [str(one.socket) for one in haproxies], "backend": "llm", "old_worker_seconds_max": 0, **more}
    return HaproxyGate(HaproxySection.model_validate(fields), "alpha")


async def close(gate: HaproxyGate) -> None:
    await gate.close(ENGINE_ID, ClosedTerms("refuse", 0, 60.0))


@asynccontextmanager
async def client_with_cookies() -> AsyncIterator[aiohttp.ClientSession]:
    jar = aiohttp.CookieJar(unsafe=True)  # of an address
    async with aiohttp.ClientSession(cookie_jar=jar) as client:
        yield client


async def ask(client: aiohttp.ClientSession, one: Haproxy, *, wait: bool = False) -> int:
    async with client.post(f"{one.url}/v1/completions", json={"wait": wait}) as answer:
        return answer.status


async def test_a_cookie_leads_to_a_draining_server_and_not_to_a_drained_one(
    sockets: Path, engine: MeteredEngine
) -> None:
    line = {"backend": "cookie S insert indirect nocache", "server": "cookie alpha"}
    with haproxy(sockets, engine, **line) as one:
        gate = gate_of(one)
        async with client_with_cookies() as client, aiohttp.ClientSession() as slow:
            assert await ask(client, one) == 200
            request = asyncio.create_task(ask(slow, one, wait=True))
            await wait_until_async(lambda: engine.running == 1, 10, "a request is in flight")
            await close(gate)
            before = engine.arrivals
            assert await ask(client, one) == 200  # `drain` keeps faith with cookies
            assert engine.arrivals == before + 1
            engine.go.set()
            assert await request == 200
            assert await gate.wait_drained(ENGINE_ID, 10) == 0
            assert await ask(client, one) == 503
            assert engine.arrivals == before + 1


async def test_one_of_two_that_cannot_be_closed_leaves_the_other_closed_and_the_gate_unknown() -> None:
    async with gate_rig(RIGS["two haproxies"]) as rig:
        assert isinstance(rig, TwoHaproxiesRig)
        gate = await rig.routed()
        await gate.open(ENGINE_ID)
        rig.haproxies[1].freeze()
        with pytest.raises(GateUnreachable):
            await gate.close(ENGINE_ID, ClosedTerms("refuse", 0, 60.0))
        first = server_states(rig.haproxies[0].ask("show servers state llm"))[0]
        assert first.is_closed
        with pytest.raises(GateUnreachable):
            await gate.observe(ENGINE_ID)
        rig.haproxies[1].thaw()
        assert (await gate.observe(ENGINE_ID)).state is GateState.UNKNOWN
        await gate.close(ENGINE_ID, ClosedTerms("refuse", 0, 60.0))
        assert (await gate.observe(ENGINE_ID)).state is GateState.CLOSED


async def test_the_gateway_is_closed_also_where_haproxy_does_not_answer() -> None:
    async with gate_rig(RIGS["haproxy and gateway"]) as rig:
        gate = await rig.routed()
        await gate.open(ENGINE_ID)
        back = GatewayGate(rig.folder / "gateway.sock")
        assert (await back.observe(ENGINE_ID)).state is GateState.OPEN
        rig.haproxies[0].freeze()
        with pytest.raises(GateUnreachable):
            await gate.close(ENGINE_ID, ClosedTerms("hold", 100, 60.0))
        assert (await back.observe(ENGINE_ID)).state is GateState.CLOSED
        rig.haproxies[0].thaw()


async def test_what_waits_in_haproxy_s_own_queue_waits_on_there_and_is_answered() -> None:
    async with gate_rig(RIGS["haproxy and gateway"]) as rig:
        (front,) = rig.haproxies
        gate = await rig.routed()
        await gate.open(ENGINE_ID)
        front.ask("set maxconn server llm/alpha 1")
        requests = [asyncio.create_task(rig.ask()) for _ in range(3)]

        def queue() -> int:
            (row,) = [line for line in front.ask("show stat").splitlines() if line.startswith("llm,BACKEND,")]
            return int(row.split(",")[2])

        await wait_until_async(lambda: rig.engine.running == 1 and queue() == 2, 10, "one runs and two wait")
        await gate.close(ENGINE_ID, ClosedTerms("hold", 100, 60.0))

        rig.engine.go.set()
        assert await gate.wait_drained(ENGINE_ID, 10) == 0
        assert rig.engine.arrivals == 1
        assert queue() == 2
        await gate.open(ENGINE_ID)
        assert await asyncio.gather(*requests) == [200, 200, 200]


async def test_a_young_haproxy_is_not_drained_while_its_old_worker_may_serve(
    sockets: Path, engine: MeteredEngine
) -> None:
    with haproxy(sockets, engine) as one:
        gate = gate_of(one, old_worker_seconds_max=3600)
        await close(gate)
        with pytest.raises(GateUnreachable, match="was started anew"):
            await gate.wait_drained(ENGINE_ID, 0.1)
        assert await gate_of(one).wait_drained(ENGINE_ID, 5) == 0


@pytest.mark.parametrize("how", ["disabled", "state file"])
async def test_a_file_that_starts_it_closed_leaves_no_gap(sockets: Path, engine: MeteredEngine, how: str) -> None:
    """As docs/gates.md has it: by `disabled`, or by the state that the agent's HAProxy was told to save."""
    saved = sockets / "state"
    saved.touch()
    line: dict[str, Any] = {"server": "disabled"}
    if how == "state file":
        line = {"globals_": f"server-state-file {saved}", "defaults": "load-server-state-from-file global"}
    with haproxy(sockets, engine, **line) as one:
        gate = gate_of(one)
        await gate.open(ENGINE_ID)
        await close(gate)
        assert await gate.wait_drained(ENGINE_ID, 5) == 0
        saved.write_text(one.ask("show servers state"))
        one.restart()
        assert (await gate.observe(ENGINE_ID)).state is GateState.CLOSED
        await gate.open(ENGINE_ID)
        async with aiohttp.ClientSession() as client:
            assert await ask(client, one) == 200


async def test_a_server_that_is_another_engine_s_is_refused(sockets: Path, engine: MeteredEngine) -> None:
    with haproxy(sockets, engine) as one:
        with pytest.raises(GateRefused, match=f"has port {engine.port}, the engine 9"):
            await gate_of(one).ensure_route(ENGINE_ID, "alpha", ["m"], "http://127.0.0.1:9")
        await gate_of(one, server_port=engine.port).ensure_route(ENGINE_ID, "alpha", ["m"], "http://127.0.0.1:9")
        with pytest.raises(GateRefused, match="Can't find backend"):
            await gate_of(one, backend="nothing").ensure_route(ENGINE_ID, "alpha", ["m"], engine.url)


async def test_a_socket_that_may_not_set_anything_says_so(sockets: Path, engine: MeteredEngine) -> None:
    weak = sockets / "weak.sock"
    with haproxy(sockets, engine, globals_=f"stats socket {weak} mode 600 level user") as one:
        gate = gate_of(one, sockets=[str(weak)])
        with pytest.raises(GateRefused, match="Permission denied"):
            await close(gate)
        assert (await gate_of(one).observe(ENGINE_ID)).state is GateState.OPEN


async def test_by_tcp_on_loopback_too(sockets: Path, engine: MeteredEngine) -> None:
    port = free_port()
    with haproxy(sockets, engine, globals_=f"stats socket ipv4@127.0.0.1:{port} level admin") as one:
        gate = gate_of(one, sockets=[f"127.0.0.1:{port}"])
        await close(gate)
        assert server_states(one.ask("show servers state llm"))[0].is_closed


async def test_a_backend_without_the_gateway_is_refused() -> None:
    async with gate_rig(RIGS["haproxy and gateway"]) as rig:
        rig.backup_port += 1
        with pytest.raises(GateRefused, match="no backup server at port"):
            await rig.routed()


@pytest.mark.parametrize("said", ["", "\n", "2\n# be_id\n", "# svname\nalpha\n", "x" * 100, "1\n# a b\n1 2\n"])
def test_what_is_no_table_is_an_error(said: str) -> None:
    for read in (server_states, server_counts):
        with pytest.raises(ValueError):
            read(said)


COLUMNS = "# pxname,svname,qcur,scur,stot,lastsess,bck,addr,"


@pytest.mark.parametrize("row", ["llm,alpha", "llm,alpha,0,0", "llm,alpha,0,0,7,"])
def test_a_row_that_ends_early_is_an_error(row: str) -> None:
    assert server_counts(f"{COLUMNS}\nllm,alpha,0,0,7,,0,127.0.0.1:9,\n")[0].total == 7
    with pytest.raises(ValueError, match="ends early"):
        server_counts(f"{COLUMNS}\n{row}\n")


@pytest.mark.parametrize(
    "answer", [f"{COLUMNS}\n", f"{COLUMNS}\nllm,alpha,0,0,7,,0,127.0.0.1:9,\n", f"{COLUMNS}\nllm,al"]
)
async def test_an_answer_without_its_last_line_is_none(sockets: Path, answer: str) -> None:
    """HAProxy ends every answer with an empty line: one without it was cut off, and may lack whole servers."""

    async def cut_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer.encode())
        writer.close()

    path = sockets / "cut.sock"
    async with await asyncio.start_unix_server(cut_off, path):
        with pytest.raises(GateUnreachable, match="cut off"):
            await RuntimeSocket(str(path), 5.0).counts("llm")
