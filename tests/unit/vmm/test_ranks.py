"""Leader and followers in one process: what is refused, undone and said. Deaths are in the integration tests."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lull.vmm
from lull.vmm.control import control_app
from lull.vmm.errors import (
    OutOfHostMemory,
    RankRefused,
    RanksFailed,
    TransitionInProgress,
    TransitionRefused,
)
from lull.vmm.lifecycle import MemoryState
from lull.vmm.pool import Pool
from lull.vmm.ranks import RankedRuntime, RankFollower, RankSettings
from lull.vmm.ranks_protocol import Kind, Message, Verb
from lull.vmm.ranks_wire import (
    FRAME_BYTES_MAX,
    Hello,
    RankLinkError,
    StatusAnswer,
    StatusQuery,
    Welcome,
    connect,
    decode,
    encode,
    listen,
)
from lull.vmm.ranks_worker import RankWorker
from lull.vmm.runtime import MemoryStatus, Runtime
from lull.vmm.signing import new_headers
from lull.vmm.tags import InvalidTag
from tests.memory import GRANULE_BYTES, small_driver
from tests.waiting import wait_until


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lull-ranks-") as path:  # short enough for a socket
        yield Path(path)


@dataclass
class Engine:
    leader: RankedRuntime
    followers: list[RankFollower]
    pools: list[Pool]
    host_bytes: list[int]

    @property
    def runtimes(self) -> list[Runtime]:
        return [self.leader.runtime, *(follower.runtime for follower in self.followers)]

    def states(self) -> list[MemoryState]:
        return [runtime.status().state for runtime in self.runtimes]


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    ranks = 3
    host_bytes = [1 << 40] * ranks
    pools: list[Pool] = []
    for rank in range(ranks):
        pools.append(
            Pool(small_driver(folder / f"device{rank}"), host_bytes_available=lambda rank=rank: host_bytes[rank])  # type: ignore[misc]
        )
        pools[rank].allocate(GRANULE_BYTES, "model_weights")
    pools[2].allocate(GRANULE_BYTES, "last_layer")  # a tag that no other rank has
    leader = RankedRuntime(Runtime(pools[0]), folder / "ranks", ranks, RankSettings(status_seconds_max=20))
    with ExitStack() as stack:
        stack.callback(leader.close)
        followers = [RankFollower(Runtime(pools[rank]), folder / "ranks", rank, ranks) for rank in (1, 2)]
        for follower in followers:
            stack.callback(follower.close)
        assert leader.wait_joined(10)
        yield Engine(leader, followers, pools, host_bytes)


def test_subsets_park_and_wake(engine: Engine) -> None:
    engine.leader.release(["model_weights", "kv_cache"])
    assert engine.states() == [MemoryState.PARKED] * 3
    assert engine.leader.status() == MemoryStatus(MemoryState.PARKED, ("kv_cache", "model_weights"))
    assert [pool.device_bytes() for pool in engine.pools] == [0, 0, GRANULE_BYTES]
    engine.leader.resume(["model_weights"])
    assert engine.leader.status() == MemoryStatus(MemoryState.PARKED, ("kv_cache",))
    engine.leader.resume()
    engine.leader.resume()  # again is no change
    assert engine.leader.status() == MemoryStatus(MemoryState.RUNNING, ())


def test_a_tag_that_one_rank_has_is_no_disagreement(engine: Engine) -> None:
    engine.leader.release()
    assert "last_layer" in engine.leader.status().parked_tags
    assert engine.leader.failure is None
    assert [pool.device_bytes() for pool in engine.pools] == [0, 0, 0]
    engine.leader.resume()


def test_what_one_rank_cannot_do_no_rank_does(engine: Engine) -> None:
    engine.host_bytes[1] = 0
    with pytest.raises(RankRefused, match=r"rank 1: out of host memory.*the release was undone on every rank"):
        engine.leader.release()
    assert engine.states() == [MemoryState.RUNNING] * 3
    engine.host_bytes[:] = [0, 1 << 40, 1 << 40]
    with pytest.raises(OutOfHostMemory):  # the leader's own, as it was raised
        engine.leader.release()
    engine.host_bytes[0] = 1 << 40
    engine.leader.release()
    thief = engine.pools[2].driver.create(63 * GRANULE_BYTES)
    with pytest.raises(RankRefused, match=r"rank 2: out of device memory.*the resume was undone on every rank"):
        engine.leader.resume()
    assert engine.states() == [MemoryState.PARKED] * 3
    engine.pools[2].driver.release(thief)
    engine.leader.resume()
    assert engine.leader.status().state is MemoryState.RUNNING


def test_refusals_are_those_of_a_single_process(engine: Engine) -> None:
    with pytest.raises(InvalidTag, match="'nonsense'"):
        engine.leader.release(["nonsense"])
    with pytest.raises(InvalidTag, match="must not be empty"):
        engine.leader.release([])
    engine.leader.release(["kv_cache"])
    with pytest.raises(TransitionRefused, match=r"memory is already parked with \[kv_cache\]"):
        engine.leader.release()
    engine.leader.resume()


def test_one_operation_at_a_time(engine: Engine) -> None:
    begun, go = threading.Event(), threading.Event()

    def hook(tags: tuple[str, ...]) -> None:
        begun.set()
        assert go.wait(30)

    engine.followers[0].runtime.on_release(hook)
    with ThreadPoolExecutor(1) as executor:
        first = executor.submit(engine.leader.release)
        assert begun.wait(30)
        with pytest.raises(TransitionInProgress, match="another park or wake is under way"):
            engine.leader.resume()
        wait_until(lambda: engine.leader.status().state is MemoryState.PARKING, 10, "rank 0 parking")
        go.set()
        first.result(30)
    assert engine.leader.status().state is MemoryState.PARKED


def test_a_rank_that_fails_by_itself_fails_the_engine(engine: Engine) -> None:
    engine.followers[1].runtime.fail("its device is lost")
    assert engine.leader.status().state is MemoryState.FAILED
    reason = "ranks disagree: rank 0 is running, rank 2 is failed: its device is lost"
    assert engine.leader.failure == reason
    wait_until(lambda: engine.followers[0].runtime.failure == reason, 10, "the other hearing of it")
    with pytest.raises(RanksFailed, match="rank 2 is failed"):
        engine.leader.release()


def test_a_rank_that_parked_alone_disagrees(engine: Engine) -> None:
    engine.followers[0].runtime.release(["kv_cache"])
    assert engine.leader.status().state is MemoryState.FAILED
    assert engine.leader.failure == "ranks disagree: rank 0 is running, rank 1 is parked"


def test_ranks_that_have_different_things_to_do_fail(engine: Engine) -> None:
    engine.followers[0].runtime.release(["kv_cache"])
    with pytest.raises(RanksFailed, match="rank 1 had nothing to do, ranks 0, 2 had"):
        engine.leader.release(["kv_cache"])
    wait_until(lambda: engine.states() == [MemoryState.FAILED] * 3, 10, "all failing")
    assert engine.pools[0].parked_tags() == frozenset()  # what was prepared is undone


async def test_the_control_routes_drive_all_ranks(engine: Engine) -> None:
    transport = httpx.ASGITransport(control_app(engine.leader, b"key"))

    async def call(method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
        headers = {**new_headers(b"key", method, path, body, now=time.time()), "content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            answer = await client.request(method, path, content=body, headers=headers)
        return answer.status_code, answer.json()

    assert await call("POST", "/release_memory", b'{"tags": ["kv_cache"]}') == (200, {"status": "success"})
    assert engine.states() == [MemoryState.PARKED] * 3
    assert await call("GET", "/memory_status") == (200, {"state": "parked", "parked_tags": ["kv_cache"]})
    assert (await call("POST", "/release_memory"))[0] == 409
    assert (await call("POST", "/release_memory", b'{"tags": ["nonsense"]}'))[0] == 400
    assert await call("POST", "/resume_memory") == (200, {"status": "success"})
    engine.followers[0].close()
    status, content = await call("POST", "/release_memory")
    assert (status, "rank 1 is gone" in str(content)) == (409, True)


def test_a_commit_that_has_not_begun_when_the_rank_fails_is_undone(folder: Path) -> None:
    pool = Pool(small_driver(folder / "device"))
    pool.allocate(GRANULE_BYTES, "model_weights")
    answers: list[Message] = []
    worker = RankWorker(Runtime(pool), answers.append)
    worker.hear(Message(Kind.PREPARE, 1, Verb.RELEASE))
    wait_until(lambda: answers, 10, "an answer")
    worker.runtime.fail("its peer is gone")
    worker.hear(Message(Kind.COMMIT, 1))
    wait_until(lambda: len(answers) == 2, 10, "another answer")
    worker.close()
    assert [answer.kind for answer in answers] == [Kind.READY, Kind.COMMIT_FAILED]
    assert answers[1].error == "RuntimeFailed"
    assert pool.device_bytes() == GRANULE_BYTES
    pool.release(["model_weights"])  # nothing of it is left under way


def test_until_all_are_there_nothing_parks(folder: Path) -> None:
    leader = RankedRuntime(Runtime(Pool(small_driver(folder / "device"))), folder / "ranks", 2)
    try:
        assert leader.status().state is MemoryState.RUNNING
        with pytest.raises(TransitionInProgress, match=r"rank\(s\) \[1\] have not joined"):
            leader.release()
    finally:
        leader.close()
    assert not (folder / "ranks").exists()


def test_who_does_not_join_in_time_fails_the_engine(folder: Path) -> None:
    runtime = Runtime(Pool(small_driver(folder / "device")))
    leader = RankedRuntime(runtime, folder / "ranks", 2, RankSettings(join_seconds_max=0.05))
    try:
        wait_until(lambda: runtime.status().state is MemoryState.FAILED, 10, "the deadline")
        assert leader.failure == "rank(s) [1] did not join within 0.05 s"
        with pytest.raises(RanksFailed, match="did not join"):
            leader.release()
    finally:
        leader.close()


def test_one_rank_is_an_engine_too(folder: Path) -> None:
    leader = RankedRuntime(Runtime(Pool(small_driver(folder / "device"))), folder / "ranks", 1)
    leader.release()
    assert leader.status().state is MemoryState.PARKED
    leader.resume()
    leader.close()
    with pytest.raises(RanksFailed):
        leader.release()


def test_once_closed_it_is_failed_and_says_so_at_once(engine: Engine) -> None:
    engine.leader.close()
    with pytest.raises(RanksFailed, match="the ranks were closed"):
        engine.leader.release()
    began = time.monotonic()
    assert engine.leader.status() == MemoryStatus(MemoryState.FAILED, ())
    assert time.monotonic() - began < 10  # status_seconds_max is 20
    assert engine.leader.failure == "the ranks were closed"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RankSettings)])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "1", None, True])
def test_a_deadline_is_a_number_of_seconds(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        RankSettings(**{field: value})


def test_what_is_no_runtime_or_no_number_is_named(folder: Path) -> None:
    runtime: Any = Runtime(Pool(small_driver(folder / "device")))
    bad: Any
    for bad in (1.5, "2", True, None):
        with pytest.raises(TypeError, match="ranks is"):
            RankedRuntime(runtime, folder / "ranks", bad)
        with pytest.raises(TypeError, match="rank is"):
            RankFollower(runtime, folder / "ranks", bad, 2)
    none: Any = None
    with pytest.raises(TypeError, match="runtime is None"):
        RankedRuntime(none, folder / "ranks", 1)
    with pytest.raises(TypeError, match="runtime is None"):
        RankFollower(none, folder / "ranks", 1, 2)


def test_its_errors_are_exported() -> None:
    assert lull.vmm.RankLinkError is RankLinkError


@pytest.mark.parametrize(
    ("rank", "ranks", "refusal"),
    [(1, 3, "it counts 3 ranks, the leader 2"), (0, 2, "there is no rank 0"), (2, 2, "there is no rank 2")],
)
def test_strangers_stay_outside(folder: Path, rank: int, ranks: int, refusal: str) -> None:
    leader = RankedRuntime(Runtime(Pool(small_driver(folder / "device"))), folder / "ranks", 2)
    assert stat.S_IMODE((folder / "ranks").stat().st_mode) == 0o600
    try:
        for garbage in (b"", b"\0\0\0\5hello", b"\xff\xff\xff\xff", struct.pack("!I", 2) + b"[]"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                stranger.connect(str(folder / "ranks"))
                stranger.sendall(garbage)
        runtime = Runtime(Pool(small_driver(folder / "other")))
        with pytest.raises(RankLinkError, match=refusal):
            RankFollower(runtime, folder / "ranks", rank, ranks)
        follower = RankFollower(runtime, folder / "ranks", 1, 2)
        assert leader.wait_joined(10)
        follower.close()
    finally:
        leader.close()


def test_a_second_leader_is_refused_and_a_dead_ones_socket_is_not(folder: Path) -> None:
    with listen(folder / "ranks", 1), pytest.raises(RankLinkError, match="another leader listens"):
        listen(folder / "ranks", 1)
    listen(folder / "ranks", 1).close()
    with pytest.raises(ValueError, match="longer than 107 bytes"):
        listen(folder / ("x" * 100), 1)


def test_no_leader_is_an_error_in_time(folder: Path) -> None:
    clock = iter(range(100))
    with pytest.raises(RankLinkError, match="no leader at"):
        connect(folder / "ranks", 3, lambda seconds: None, lambda: float(next(clock)))


FRAMES = [
    Message(Kind.PREPARE, 3, Verb.RELEASE, ("kv_cache",)),
    Message(Kind.REFUSED, 3, error="OutOfHostMemory", reason="no room"),
    Hello(1, 2),
    Welcome(""),
    StatusQuery(9),
    StatusAnswer(9, "running", (), ("kv_cache",), ""),
]


@pytest.mark.parametrize("frame", FRAMES)
def test_frames_survive_the_wire(frame: Message) -> None:
    data = encode(frame)
    assert struct.unpack("!I", data[:4])[0] == len(data) - 4
    assert decode(data[4:]) == frame


def test_a_frame_has_a_bound() -> None:
    with pytest.raises(RankLinkError, match="too many or too long tags"):
        encode(Message(Kind.PREPARE, 1, Verb.RELEASE, ("t" * 64,) * (FRAME_BYTES_MAX // 64)))
    assert len(encode(Message(Kind.REFUSED, 1, reason="r" * (1 << 20)))) < FRAME_BYTES_MAX


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.binary(max_size=60), JSON.map(lambda value: json.dumps(value).encode())))
def test_noise_is_an_error_and_nothing_else(body: bytes) -> None:
    with pytest.raises(RankLinkError):
        decode(body)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(FRAMES), st.data())
def test_a_frame_that_was_tampered_with_is_a_frame_or_an_error(frame: Message, data: st.DataObject) -> None:
    content = json.loads(encode(frame)[4:])
    name = data.draw(st.sampled_from(sorted(content)))
    if data.draw(st.booleans()):
        content[name] = data.draw(JSON)
    else:
        del content[name]
    try:
        decode(json.dumps(content).encode())
    except RankLinkError:
        return


def test_a_peer_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listen(folder / "ranks", 1):
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(RankLinkError, match="not 12345"):
            connect(folder / "ranks", 1, lambda seconds: None, lambda: 0.0)
