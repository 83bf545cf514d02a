"""Whatever stands in a file that the agent reads when it starts, it starts: what is odd is unknown, and what is known
can be used, kept again and reported."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lull.agents.attempt_files import AttemptDir, AttemptOutcome, BadRecord
from lull.agents.attempts import AttemptProcess, read_log
from lull.agents.device_opening import _Record
from lull.agents.engine_facts import read_facts
from lull.agents.engine_process import EngineProcess
from lull.agents.engines.ledger import Ledger
from lull.agents.journal import Journal
from lull.agents.main import _tell_running
from lull.agents.node_files import NodeFile, read_json, replace_json
from lull.agents.opening import refuse_copy
from lull.agents.park_history import ParkHistory
from lull.agents.probe_nvml import NvidiaDevice
from lull.agents.processes import boot_id
from lull.agents.protocol.wire import AttemptChanged, AttemptEnd, AttemptState
from lull.agents.quarantine import read_quarantine
from lull.agents.settings import EngineSettings
from lull.vmm.errors import LedgerUnreadable
from lull.vmm.host_device import HostDevice
from lull.vmm.tags import RestoreMode
from tests.odd_json import odd_bytes

any_file = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MODES = {"model_weights": RestoreMode.CPU, "kv_cache": RestoreMode.NONE}
PROCESS = {"boot_id": "b", "pid": 7, "start_ticks": 9}
CHARGE = {"key": "k", "pid": 7, "start_ticks": 9}


@contextlib.contextmanager
def file_of(raw: bytes, name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lull-") as directory:
        path = Path(directory) / name
        path.write_bytes(raw)
        yield path


def history(data: dict[str, Any]) -> ParkHistory:
    def remember(parks: dict[str, Any]) -> None:
        data["parks"] = parks

    return ParkHistory(lambda: data, remember, lambda: "key", lambda: "b:7:9", lambda: MODES)


def facts() -> dict[str, Any]:
    """As an agent writes them."""
    data: dict[str, Any] = dict.fromkeys(("verified", "released", "condemned", "given_up", "restart_of"), "b:7:9")
    data |= {"started_in_boot": "b", "footprint_of": "key", "footprint": {"d0": 9}, "shared": {"d0": ["weights"]}}
    data |= {"golden": {"key": {"text": "\ud83d", "token_ids": [1], "token_logprobs": [-0.5]}}, "short_sleeps": 2}
    history(data).try_begins(MODES)
    history(data).parked(MODES, {"d0": 7}, {"d0": 1}, seconds=0.5, at=5.0)
    history(data).woken(MODES, 0.5)
    history(data).fell_short({"kv_cache": RestoreMode.NONE}, {"d0": 7}, {"d0": 1}, released=True)
    history(data).went_wrong({"kv_cache": RestoreMode.NONE}, "it broke")
    return data


FACTS = facts()


def test_all_that_is_written_of_an_engine_is_read_again(tmp_path: Path) -> None:
    replace_json(tmp_path / "facts.json", FACTS)
    assert read_facts(tmp_path / "facts.json") == FACTS


@any_file
@given(raw=odd_bytes(FACTS))
def test_the_facts_of_an_engine(raw: bytes) -> None:
    with file_of(raw, "facts.json") as path:
        known = read_facts(path)
        parks = history(known)
        for way in parks.learned().ways:
            way.model_dump_json()
        for modes in (MODES, {"kv_cache": RestoreMode.NONE}):
            parks.is_known(modes)
            parks.too_little(modes, {"d0": 1})
            parks.try_begins(modes)
            parks.parked(modes, {"d0": 7}, {"d0": 1}, seconds=0.5, at=5.0)
            parks.growth(modes, {"d0": 9})
            parks.fell_short(modes, {"d0": 7}, {"d0": 1}, released=True)
            parks.woken(modes, 1.0)
        parks.forgive()
        replace_json(path, known)
        assert read_facts(path).get("parks") == known["parks"]


LEDGERS: list[dict[str, Any]] = [
    {"incarnation": "b:7:9", "state": "parking", "processes": [PROCESS]},
    {
        "incarnation": "b:7:9",
        "state": "released",
        "tags": ["weights"],
        "bytes": {"d0": 9},
        "reload": "/m",
        "calling": [],
    },
    {
        "incarnation": "b:7:9",
        "park": "sent",
        "wake": None,
        "wakes_failed": 0,
        "level": 2,
        "tags": ["x"],
        "reload": True,
    },
    {"incarnation": "boot", "ending": "b:7:9"},
]


@pytest.mark.parametrize("good", LEDGERS)
@any_file
@given(data=st.data())
def test_what_an_engine_was_told(good: dict[str, Any], data: st.DataObject) -> None:
    for raw in (json.dumps(good).encode(), data.draw(odd_bytes(good))):
        with file_of(raw, "ledger.json") as path:
            ledger = Ledger(path, lambda: good["incarnation"])
            told = ledger.read()
            assert raw != json.dumps(good).encode() or told == {k: v for k, v in good.items() if k != "incarnation"}
            kinds = {"tags": list, "calling": list, "bytes": dict, "processes": list, "level": int, "wakes_failed": int}
            assert all(type(told[key]) is kind for key, kind in kinds.items() if key in told)
            ledger.write(state="pausing")
            assert Ledger(path, lambda: good["incarnation"]).read()["state"] == "pausing"


@any_file
@given(raw=odd_bytes({"process": PROCESS, "restore_modes": MODES, "started_at": 1.5}))
def test_the_process_of_an_engine(raw: bytes) -> None:
    given_ = {"name": "alpha", "kind": "vllm", "models": ["m"], "url": "http://127.0.0.1:9", "device_indexes": [0]}
    with file_of(raw, "process.json") as path:
        command = EngineSettings.model_validate({**given_, "command": ["true"]})
        process = EngineProcess(path.parent, "engine-that-never-was", command, path.parent / "m.sock", "")
        assert not process.adopt()
        assert process.pids() == set()
        assert {RestoreMode(mode) for mode in process.restore_modes.values()} <= set(RestoreMode)


@any_file
@given(raw=odd_bytes({"node": "0198-n", "engine:alpha": "0198-e"}))
@example(raw=b'{"node": "0198-n"}')
def test_the_ids_of_a_node(raw: bytes) -> None:
    with file_of(raw, "node.json") as path:
        file = NodeFile(path, lambda: "fresh", Journal(path.with_name("journal.sqlite")))
        ids = [file.id_of("node"), file.id_of("engine:alpha")]
        assert all(0 < len(each.encode("ascii")) <= 100 for each in ids)
        for lost in ("journal.sqlite", "node.json"):  # either one, and they are the same
            path.with_name(lost).unlink()
            again = NodeFile(path, lambda: "other", Journal(path.with_name("journal.sqlite")))
            assert [again.id_of(what) for what in ("node", "engine:alpha")] == ids


GPU = NvidiaDevice("GPU-1", "H200", 10**11, unified=False)


@any_file
@given(
    raw=odd_bytes(
        {
            "devices": {"GPU-1": {"uuid": "GPU-1", "name": "H200", "capacity_bytes": 10**11, "unified": False}},
            "indexes": {"0": "GPU-1"},
        }
    )
)
def test_the_gpus_that_were_opened(raw: bytes) -> None:
    with file_of(raw, "devices.json") as path:
        record = _Record(path)
        known = record.device("GPU-1")
        assert known is None or 0 <= known.capacity_bytes < 2**63
        assert isinstance(record.at_index(0), str | None)
        record.add(GPU, 0)
        record.keep()
        assert (_Record(path).device("GPU-1"), _Record(path).at_index(0)) == (GPU, "GPU-1")


@any_file
@given(raw=odd_bytes({"devices": {"d0": {"code": "JournalCorrupt", "sentence": "s", "data": {}}}}))
def test_a_quarantine(raw: bytes) -> None:
    with file_of(raw, "quarantine.json") as path:
        kept = read_quarantine(path.parent, ["d0", "d1"])
        whole = isinstance(read_json(path).get("devices"), dict)
        assert whole or kept.keys() == {"d0", "d1"}, "what cannot be read lends nothing"


EXIT: dict[str, Any] = {"end": "exited", "exit_code": 0, "signal": None, "started_at": 1.5, "ended_at": 2.5}
EXIT |= {"boottime": 9.5, "stragglers_killed": 1, "peak_rss_bytes": 9, "cpu_seconds": 0.5, "message": "m"}
EXIT |= {"cleanup": {"code": "unkillable", "pids": [7]}, "log_bytes": {"stdout": 9}}
# The start of a process that no pid has had.
RUNNER = {"boot_id": boot_id(), "pid": 2**31 - 1, "start_ticks": 9}
STARTED = {"pid": 2**31 - 1, "start_ticks": 9, "at": 1.5, "boottime": 9.5}
SPEC = {"attempt_id": "attempt-that-never-was", "job_id": "j", "argv": ["true"], "env": {"A": "b"}, "workdir": None}


def told(outcome: AttemptOutcome) -> dict[str, Any]:
    """As it goes into the journal and on the wire."""
    report = AttemptChanged(
        attempt_id="a",
        job_id="j",
        loan_id="l",
        state=AttemptState.ENDED,
        end=outcome.end,
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        started_at=outcome.started_at,
        ended_at=outcome.ended_at,
        cleanup=outcome.cleanup,
        reason=outcome.reason,
    )
    json.dumps([outcome.boottime, outcome.peak_rss_bytes, outcome.cpu_seconds], allow_nan=False)
    return json.loads(report.model_dump_json())


def test_the_record_that_a_runner_leaves_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "exit.json").write_text(json.dumps(EXIT))
    outcome = AttemptDir(tmp_path).exit_record()
    assert outcome is not None
    assert (outcome.exit_code, outcome.peak_rss_bytes, outcome.boottime) == (0, 9, 9.5)
    assert AttemptDir(tmp_path).log_bytes() == {"stdout": 9}
    assert told(outcome)["cleanup"]["data"] == {"pids": [7]}
    assert AttemptDir(tmp_path).settle() == outcome


@any_file
@given(raw=odd_bytes(EXIT))
@example(raw=json.dumps({**EXIT, "log_bytes": []}).encode())
@example(raw=json.dumps({**EXIT, "log_bytes": {"stdout": "x"}}).encode())
def test_a_record_of_an_attempt(raw: bytes) -> None:
    with file_of(raw, "exit.json") as path:
        directory = AttemptDir(path.parent)
        try:
            record = directory.exit_record()
        except BadRecord:
            record = None
        outcome = directory.settle(0.0)
        assert outcome == record or outcome.end is AttemptEnd.NOT_STARTED
        assert told(outcome)["end"] in set(AttemptEnd)
        assert directory.exit_record() == outcome
        with contextlib.suppress(FileNotFoundError):  # there was output, and there are no files of it here
            read_log(path.parent, "stdout", 0, 10)


@any_file
@given(data=st.data(), name=st.sampled_from(["identity", "started", "spec"]), go=st.booleans())
def test_the_records_by_which_an_attempt_is_judged(data: st.DataObject, name: str, go: bool) -> None:
    good = {"identity": RUNNER, "started": STARTED, "spec": SPEC}
    with file_of(data.draw(odd_bytes(good[name])), f"{name}.json") as path:
        for other in good.keys() - {name}:
            (path.parent / f"{other}.json").write_text(json.dumps(good[other]))
        if go:
            (path.parent / "starting.json").write_text("{}")
        directory = AttemptDir(path.parent)
        for look in (directory.identity, directory.started, directory.spec):
            with contextlib.suppress(BadRecord):
                look()
        adopted = asyncio.run(AttemptProcess.adopt(directory, seconds_max=0.0))
        assert adopted.outcome is not None, "a runner was here, readable or not"
        rebooted = name == "identity" and adopted.outcome.end is AttemptEnd.NODE_REBOOTED
        lost = AttemptEnd.RUNNER_LOST if go else AttemptEnd.NOT_STARTED
        assert adopted.outcome.end is lost or (rebooted and isinstance(json.loads(path.read_bytes())["boot_id"], str))
        told(adopted.outcome)


@any_file
@given(home=odd_bytes({"boot_id": "b", "inode": 7}), agent=odd_bytes(PROCESS))
def test_who_ran_here(home: bytes, agent: bytes) -> None:
    with file_of(home, "home.json") as path:
        refuse_copy(path.parent, boot_id())
        (path.parent / "agent.json").write_bytes(agent)
        assert not _tell_running(path.parent)


@any_file
@given(raw=odd_bytes({"uuid": "HOST-1", "kind": "discrete", "capacity_bytes": 4096, "created_at": 1.5}))
def test_a_host_device_is_one_or_says_what_is_wrong_with_it(raw: bytes) -> None:
    with file_of(raw, "device.json") as path:
        try:
            device = HostDevice.open(path.parent)
        except ValueError as error:
            said = str(error)
        else:
            said = "does not describe a host device"
            assert 0 < device.capacity_bytes < 2**63
            assert (device.kind in ("discrete", "unified"), bool(device.uuid)) == (True, True)
        assert "does not describe a host device" in said


@any_file
@given(raw=odd_bytes({"boot_id": boot_id(), "rows": [{**CHARGE, "nbytes": 1, "owner": ""}]}))
def test_the_ledger_of_a_host_device_is_one_or_says_that_it_is_none(raw: bytes) -> None:
    with file_of(raw, "ledger") as path:
        device = HostDevice.create(path.parent, capacity_bytes=4096)
        with contextlib.suppress(LedgerUnreadable):
            assert 0 <= device.free_bytes() <= 4096
