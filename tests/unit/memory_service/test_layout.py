"""What a pool is made of, and the hash that says whether it is what an engine was built on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lull.vmm.service import layout as layouts
from lull.vmm.service.errors import LayoutInvalid
from lull.vmm.service.layout import Entry, Layout, SlotRecord
from lull.vmm.service.slabs import pack

RECORD = SlotRecord(1000, 4096, "model_weights")


def small() -> Layout:
    layout = Layout()
    first, second = layout.add(RECORD), layout.add(RECORD)
    layout.put("a", Entry(first, 0, 1000, {"dtype": "float32"}))
    layout.put("b", Entry(second, 8, 8, None))
    return layout


@pytest.mark.parametrize(
    "change",
    [
        lambda layout: layout.add(RECORD),
        lambda layout: layout.put("c", Entry(0, 0, 1, None)),
        lambda layout: layout.put("a", Entry(0, 0, 999, {"dtype": "float32"})),
        lambda layout: layout.put("a", Entry(1, 0, 1000, {"dtype": "float32"})),
        lambda layout: layout.put("a", Entry(0, 0, 1000, {"dtype": "float16"})),
        lambda layout: layout.delete("b"),
        lambda layout: layout.slots.update({1: SlotRecord(1000, 4096, "model")}),
        lambda layout: layout.slots.update({1: SlotRecord(1000, 8192, "model_weights")}),
    ],
)
def test_the_hash_is_about_everything_that_a_reader_relies_on(change: Callable[[Layout], object]) -> None:
    layout = small()
    assert layout.digest() == small().digest()
    change(layout)
    assert layout.digest() != small().digest()


def test_a_slot_that_was_freed_on_the_way_changes_nothing() -> None:
    layout = Layout()
    first, garbage, second = (layout.add(RECORD) for _ in range(3))
    layout.put("a", Entry(first, 0, 1000, {"dtype": "float32"}))
    layout.put("load-time", Entry(garbage, 0, 10, None))
    layout.put("b", Entry(second, 8, 8, None))
    layout.remove(garbage)
    assert "load-time" not in layout.entries
    assert layout.digest() == small().digest()


@pytest.mark.parametrize(
    ("slot", "offset", "nbytes"), [(0, -1, 10), (0, 0, 0), (0, 0, 1001), (0, 1000, 1), (0, 999, 2), (7, 0, 1)]
)
def test_an_entry_that_does_not_fit_is_refused(slot: int, offset: int, nbytes: int) -> None:
    layout = small()
    with pytest.raises(LayoutInvalid):
        layout.put("c", Entry(slot, offset, nbytes, None))
    assert layout.digest() == small().digest()


def test_nothing_and_dangling_entries_are_not_committed() -> None:
    with pytest.raises(LayoutInvalid, match="nothing was allocated"):
        Layout().check()
    layout = small()
    layout.check()
    del layout.slots[1]
    with pytest.raises(LayoutInvalid, match="entry b points to allocation 1"):
        layout.check()


def test_what_is_not_there_is_not_removed() -> None:
    layout = small()
    with pytest.raises(LayoutInvalid):
        layout.remove(9)
    with pytest.raises(LayoutInvalid):
        layout.delete("z")


def test_a_pool_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "ALLOCATIONS_MAX", 2)
    monkeypatch.setattr(layouts, "ENTRIES_MAX", 3)
    monkeypatch.setattr(layouts, "ENTRY_BYTES_MAX", 60)
    layout = small()
    with pytest.raises(LayoutInvalid, match="2 allocations already"):
        layout.add(RECORD)
    with pytest.raises(LayoutInvalid, match="at most 3 entries of 60 bytes"):
        layout.put("c", Entry(0, 0, 1, "x" * 60))
    layout.put("a", Entry(0, 0, 1000, "x" * 40))  # replaced: the old one's bytes count no more
    layout.put("c", Entry(0, 0, 1, None))
    with pytest.raises(LayoutInvalid, match="at most 3 entries"):
        layout.put("d", Entry(0, 0, 1, None))
    layout.delete("a")
    layout.put("d", Entry(0, 0, 1, None))


def test_entries_come_in_pages() -> None:
    layout = Layout()
    layout.add(RECORD)
    for number in range(10):
        layout.put(f"key{number}", Entry(0, number, 1, number))
    seen: list[str] = []
    after: str | None = None
    while page := list(layout.page(after, 330)):
        assert len(page) <= 3
        seen += [key for key, _ in page]
        after = page[-1][0]
    assert seen == sorted(layout.entries)


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        ([], []),
        ([10], [(0, 0)]),
        ([10, 10], [(0, 0), (0, 64)]),
        ([100, 100], [(0, 0), (1, 0)]),
        ([300, 10, 300], [(0, 0), (1, 0), (2, 0)]),
        ([64, 64, 64, 64], [(0, 0), (0, 64), (1, 0), (1, 64)]),
    ],
)
def test_pieces_are_packed_into_few_allocations(sizes: list[int], places: list[tuple[int, int]]) -> None:
    assert pack(sizes, slab_bytes=128, alignment_bytes=64) == places
