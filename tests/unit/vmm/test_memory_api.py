"""docs/memory-api.md is what can be imported, with the signatures that it has."""

from __future__ import annotations

import re

import pytest

import lull.vmm
from lull.vmm.pool import Pool
from tests import memory_api
from tests.doc_examples import DOCS


def test_the_page_lists_what_there_is() -> None:
    assert (DOCS / "memory-api.md").read_text() == memory_api.page(), (
        "run: python -m tests.memory_api > docs/memory-api.md"
    )


def test_every_public_name_has_an_entry() -> None:
    listed = set(re.findall(r"^### (\w+)$|^\| `(\w+)` \|", memory_api.page(), re.MULTILINE))
    assert {first or second for first, second in listed} == set(lull.vmm.__all__)


def test_a_changed_a_new_and_a_missing_name_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    page = memory_api.page()

    def allocate(self: Pool, nbytes: int) -> None:
        """Another signature."""

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "allocate", allocate)
        assert memory_api.page() != page
    with monkeypatch.context() as patch:
        patch.setattr(Pool, "another", allocate, raising=False)
        assert memory_api.page() != page
    with monkeypatch.context() as patch:
        patch.setattr(lull.vmm, "__all__", [name for name in lull.vmm.__all__ if name != "Pool"])
        assert memory_api.page() != page
    assert memory_api.page() == page
