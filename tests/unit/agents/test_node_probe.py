"""A device that cannot be read is absent, quarantined and told of, once; and what follows when it is back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from lull.agents.bounded_probe import BoundedProbe, bounded
from lull.agents.errors import DeviceAbsent
from lull.agents.node_probe import Absences
from lull.agents.probe import DeviceFacts, Facts, unified_facts, why_absent
from lull.agents.protocol.words import Reason
from tests.waiting import wait_until

HERE = DeviceFacts(100, 40)
LOST = Reason(code="DeviceLost", sentence="gone")
SILENT = Reason(code="DeviceUnreadable", sentence="silent")


class Told:
    """What an operator is told."""

    def __init__(self) -> None:
        self.alerts: list[tuple[str, str]] = []
        self.lost: list[str] = []
        self.quarantined: dict[str, Reason] = {}
        self.absences = Absences(self.quarantined, lambda severity, code, *_: self.alerts.append((severity, code)))
        self.absences.on_lost = lambda device_id, _reason: self.lost.append(device_id)


def test_what_could_not_be_read_is_no_key_and_asking_for_it_says_why() -> None:
    facts = Facts({"a": HERE}, {"b": LOST})
    assert "b" not in facts
    with pytest.raises(DeviceAbsent, match="gone"):
        facts["b"]
    assert why_absent(facts, ["a", "b"]) == LOST
    assert why_absent(facts, ["a"]) is None
    assert why_absent({"a": HERE}, ["c"]) is not None


def test_a_lost_gpu_is_quarantined_and_told_of_once_until_it_is_back() -> None:
    told = Told()
    for _ in range(3):
        told.absences.see(Facts({"a": HERE}, {"b": LOST}))
    assert told.quarantined == {"b": LOST}
    assert told.alerts == [("critical", "device_lost")]
    assert told.lost == ["b"]
    assert told.absences.lost("b") == LOST
    told.absences.see(Facts({"a": HERE, "b": HERE}))
    assert told.quarantined == {}
    assert told.absences.lost("b") is None
    assert told.alerts[1:] == [("info", "device_back")]


def test_one_that_is_only_silent_is_not_lost_until_the_driver_says_so() -> None:
    told = Told()
    told.absences.see(Facts({}, {"b": SILENT}))
    assert (told.lost, told.absences.lost("b")) == ([], None)
    told.absences.see(Facts({}, {"b": LOST}))
    assert told.lost == ["b"]
    assert [code for _, code in told.alerts] == ["device_unreadable", "device_lost"]
    assert told.quarantined == {"b": LOST}


def test_a_quarantine_of_somebody_else_stays() -> None:
    told = Told()
    theirs = told.quarantined["b"] = Reason(code="JournalCorrupt", sentence="look for running jobs")
    for reason in (SILENT, SILENT, LOST):
        told.absences.see(Facts({}, {"b": reason}))
        assert told.quarantined == {"b": theirs}
    told.absences.see(Facts({"b": HERE}))
    assert told.quarantined == {"b": theirs}


def test_a_quarantine_of_somebody_else_stays_also_where_it_came_while_the_device_was_silent() -> None:
    told = Told()
    told.absences.see(Facts({}, {"b": SILENT}))
    theirs = told.quarantined["b"] = Reason(code="JournalCorrupt", sentence="look for running jobs")
    for reason in (SILENT, LOST):
        told.absences.see(Facts({}, {"b": reason}))
        assert told.quarantined == {"b": theirs}
    told.absences.see(Facts({"b": HERE}))
    assert told.quarantined == {"b": theirs}


def test_a_driver_that_hangs_is_waited_for_once_and_then_told_at_once() -> None:
    go, reads = threading.Event(), [0]

    def read() -> Iterator[tuple[str, DeviceFacts | Reason]]:
        reads[0] += 1
        yield "a", HERE
        if reads[0] == 1:
            assert go.wait(60)
        yield "b", HERE

    probe = BoundedProbe(read, ["a", "b"], seconds_max=0.1)
    seen = probe.look()
    assert list(seen) == ["a"]  # what was read before is known
    assert "did not answer within 0.1 s" in seen.absent["b"].sentence
    began = time.monotonic()
    for _ in range(50):
        assert "b" not in probe.look()
    assert time.monotonic() - began < 2.5  # not 50 times the bound
    assert reads[0] == 1
    go.set()
    wait_until(lambda: "b" in probe.look(), 10, "the driver answers again")


def test_a_look_that_goes_wrong_is_told_and_the_next_one_is_made() -> None:
    reads = [0]

    def read() -> Iterator[tuple[str, DeviceFacts | Reason]]:
        reads[0] += 1
        yield "a", HERE
        if reads[0] == 1:
            b"\xff".decode()
        yield "b", HERE

    probe = BoundedProbe(read, ["a", "b"], seconds_max=60)
    began = time.monotonic()
    seen = probe.look()
    assert time.monotonic() - began < 30  # nobody waits for what will not come
    assert list(seen) == ["a"]
    assert seen.absent["b"].code == "DeviceUnreadable"
    assert "b: the look at it went wrong: UnicodeDecodeError: " in seen.absent["b"].sentence
    assert list(probe.look()) == ["a", "b"]


def test_looks_at_the_same_time_share_a_read_that_began_after_them() -> None:
    gate, reads = threading.Semaphore(0), [0]

    def read() -> Iterator[tuple[str, DeviceFacts | Reason]]:
        reads[0] += 1
        assert gate.acquire(timeout=60)
        yield "a", DeviceFacts(100, reads[0])

    probe = BoundedProbe(read, ["a"], seconds_max=30)
    seen: list[int] = []
    first = threading.Thread(target=lambda: seen.append(probe.look()["a"].used_bytes))
    first.start()
    wait_until(lambda: reads[0] == 1, 10, "the first read")
    more = [threading.Thread(target=lambda: seen.append(probe.look()["a"].used_bytes)) for _ in range(4)]
    for thread in more:
        thread.start()
    wait_until(lambda: probe._requests.qsize() == 4, 10, "four that wait")
    gate.release(2)
    for thread in [first, *more]:
        thread.join(10)
    assert sorted(seen) == [1, 2, 2, 2, 2]


def test_a_call_that_does_not_come_back_is_given_up() -> None:
    go = threading.Event()
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        bounded(lambda: go.wait(30), 0.05)
    go.set()
    assert bounded(lambda: 7, 5) == 7
    with pytest.raises(KeyError):
        bounded(lambda: dict[str, int]()["x"], 5)


def test_what_is_free_on_unified_memory_is_what_the_host_can_still_give() -> None:
    facts = DeviceFacts(1000, 300, {5: 300})
    assert unified_facts(facts, 80, lambda: 500).free_bytes == 420
    assert unified_facts(facts, 80, lambda: 10_000).free_bytes == 700
    assert unified_facts(facts, 80, lambda: 50).free_bytes == 0
    assert unified_facts(facts, 80, lambda: 500).bytes_by_pid == {5: 300}
    assert unified_facts(facts, 80, lambda: 500).unified
