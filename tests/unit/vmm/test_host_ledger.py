"""The lines of a ledger: what they cost, what is left of a writer that died, other formats, and the dead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lull.vmm.errors import LedgerUnreadable
from lull.vmm.host_device import HostDevice
from lull.vmm.host_ledger import Charge, Ledger, ProcessKey, boot_id

ME = ProcessKey(os.getpid(), 0)
LINE_BYTES_MAX = 200


def row(key: str, process: ProcessKey = ME, nbytes: int = 10, owner: str | None = None) -> Charge:
    return Charge(key, process.pid, process.start_ticks, nbytes, owner)


def keys(ledger: Ledger) -> set[str]:
    return {charge.key for charge in ledger.read().rows()}


class Writes:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        write, read = os.pwrite, os.pread

        def counted_write(fd: int, text: bytes, offset: int) -> int:
            self.nbytes += len(text)
            return write(fd, text, offset)

        def counted_read(fd: int, nbytes: int, offset: int) -> bytes:
            self.nbytes += nbytes
            return read(fd, nbytes, offset)

        monkeypatch.setattr(os, "pwrite", counted_write)
        monkeypatch.setattr(os, "pread", counted_read)


def test_one_more_charge_costs_one_line_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = HostDevice.create(tmp_path / "d", capacity_bytes=1 << 40)
    me = next(iter(device_rows_of_this_process(device)))
    writes = Writes(monkeypatch)
    costs: list[int] = []
    for number in range(2000):
        before = writes.nbytes
        device.charge(row(f"{number:032}", me), None)
        costs.append(writes.nbytes - before)
    assert max(costs) <= 2 * LINE_BYTES_MAX, "also the last one, with all the others there"
    before = writes.nbytes
    for number in range(1999):
        device.discharge({f"{number:032}"}, me)
    assert writes.nbytes - before <= 1999 * 3 * LINE_BYTES_MAX, "writing anew is paid for by what has gone"
    assert [charge.key for charge in device.charges()] == [f"{1999:032}"]
    assert os.path.getsize(tmp_path / "d" / "ledger") < 100_000


def device_rows_of_this_process(device: HostDevice) -> set[ProcessKey]:
    from lull.vmm.host_device import process_key

    me = process_key(os.getpid())
    assert me is not None
    return {me}


def test_half_a_line_does_not_count_and_is_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger")
    first, second = Ledger(path), Ledger(path)
    first.read()
    first.charge([row("a")])
    whole = Path(path).read_bytes()
    first.charge([row("b"), row("c")])
    line = Path(path).read_bytes()[len(whole) :]
    for cut in range(len(line)):
        Path(path).write_bytes(whole + line[:cut])
        assert keys(Ledger(path)) == {"a"}, "both of its rows or neither"
    second.read()
    second.charge([row("d")])
    assert keys(second) == keys(Ledger(path)) == {"a", "d"}
    assert Path(path).read_bytes().startswith(whole)


def test_a_line_that_was_changed_is_refused(tmp_path: Path) -> None:
    device = HostDevice.create(tmp_path / "d", capacity_bytes=1000)
    (me,) = device_rows_of_this_process(device)
    device.charge(row("a", me), None)
    device.charge(row("b", me), None)
    ledger = tmp_path / "d" / "ledger"
    good = ledger.read_bytes()
    for text in (good.replace(b'"a"', b'"x"'), good[:50], b"", b"lull-ledger-3 " + good[14:]):
        ledger.write_bytes(text)
        with pytest.raises(LedgerUnreadable, match="remove it"):
            HostDevice.open(tmp_path / "d").free_bytes()
    ledger.write_bytes(good)
    assert HostDevice.open(tmp_path / "d").free_bytes() == 980


def test_a_ledger_of_the_first_format_is_read_and_written_anew(tmp_path: Path) -> None:
    device = HostDevice.create(tmp_path / "d", capacity_bytes=1000)
    (me,) = device_rows_of_this_process(device)
    old = {"key": "old", "pid": me.pid, "start_ticks": me.start_ticks, "nbytes": 30, "owner": "job"}
    path = tmp_path / "d" / "ledger"
    path.write_text(json.dumps({"boot_id": boot_id(), "rows": [old]}))
    assert device.free_bytes() == 970
    device.charge(row("new", me), None)
    assert path.read_bytes().startswith(b"lull-ledger-2 ")
    assert {charge.key for charge in HostDevice.open(tmp_path / "d").charges()} == {"old", "new"}
    path.write_text(json.dumps({"boot_id": "another", "rows": [old]}))
    assert device.free_bytes() == 1000


def test_rows_of_the_dead_go_when_the_file_is_written_anew(tmp_path: Path) -> None:
    device = HostDevice.create(tmp_path / "d", capacity_bytes=1 << 40)
    (me,) = device_rows_of_this_process(device)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for number in range(1000):
        device.charge(row(f"dead{number:028}", ProcessKey(gone.pid, 1)), None)
    assert device.charges() == []
    device.charge(row("a", me), None)
    text = (tmp_path / "d" / "ledger").read_bytes()
    assert text.count(b"dead") < 1000 // 2
    assert [charge.key for charge in HostDevice.open(tmp_path / "d").charges()] == ["a"]


PROCESSES = [ProcessKey(os.getpid(), number) for number in range(2)]
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["charge", "discharge", "torn", "anew"]),
        st.integers(0, 1),
        st.sets(st.sampled_from("abcd"), min_size=1),
        st.sampled_from([None, "job"]),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(acts=ACTS)
def test_two_views_of_a_ledger_agree_with_a_model(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[str, int, set[str], str | None]]
) -> None:
    path = str(tmp_path_factory.mktemp("ledger") / "ledger")
    views = [Ledger(path), Ledger(path)]
    model: dict[tuple[ProcessKey, str], str | None] = {}
    for act, who, names, owner in acts:
        process, view = PROCESSES[who], views[who]
        view.read()
        if act == "charge":
            view.charge([row(name, process, 10, owner) for name in sorted(names)])
            model = {(process, name): owner for name in names} | model
        elif act == "discharge":
            view.discharge(process, names)
            model = {held: of for held, of in model.items() if not (held[0] == process and held[1] in names)}
        elif act == "torn" and os.path.exists(path):
            with open(path, "ab") as file:
                file.write(b"12345678 {half")
        elif act == "anew":
            views[who] = Ledger(path)
        for ledger in views:
            holds = ledger.read()
            assert {(one.process, one.key): one.owner for one in holds.rows()} == model
            assert holds.count() == len(model)
            assert holds.used_bytes == 10 * len({key for _, key in model})
            assert holds.owned_bytes("job") == 10 * len({key for (_, key), of in model.items() if of == "job"})
