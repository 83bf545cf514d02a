from __future__ import annotations

import re

import pytest

from lull.vmm.errors import UnsupportedMode
from lull.vmm.tags import (
    INIT_ONLY_TAGS,
    TAG_PATTERN,
    TRTLLM_TAGS,
    InvalidTag,
    RestoreMode,
    normalize_tags,
    require_mode,
    require_tags,
)

KNOWN = (*TRTLLM_TAGS, *INIT_ONLY_TAGS)


def test_default_is_every_tag_that_may_be_released() -> None:
    assert normalize_tags(None, KNOWN) == TRTLLM_TAGS


def test_keeps_the_first_seen_order_without_repeats() -> None:
    assert normalize_tags(["sampler", "model", "sampler"], KNOWN) == ("sampler", "model")


@pytest.mark.parametrize(
    ("tags", "text"),
    [
        ([], "Runtime memory tags must not be empty."),
        (["bogus"], "Invalid runtime memory tag 'bogus'. Expected one of: "),
        (
            ["_no_capture_init_kv_cache"],
            "Runtime memory tag '_no_capture_init_kv_cache' is an initialization-only tag and cannot be released.",
        ),
    ],
)
def test_refuses_in_the_words_of_tensorrt_llm(tags: list[str], text: str) -> None:
    with pytest.raises(InvalidTag, match=re.escape(text)):
        normalize_tags(tags, KNOWN)


@pytest.mark.parametrize("tag", KNOWN)
def test_the_pattern_allows_every_known_tag(tag: str) -> None:
    assert TAG_PATTERN.fullmatch(tag)


@pytest.mark.parametrize("tag", ["", "Model", "kv-cache", "1st", "a" * 64, "kv cache", "kv\n"])
def test_the_pattern_refuses(tag: str) -> None:
    assert not TAG_PATTERN.fullmatch(tag)


def test_a_mode_is_one_of_ours_or_its_exact_name() -> None:
    assert require_mode("CPU") is RestoreMode.CPU
    assert require_mode(RestoreMode.NONE) is RestoreMode.NONE
    for bad in ("FOO", "cpu", "", None, 1):
        with pytest.raises(UnsupportedMode, match="use one of CPU, PINNED, NONE, MEMSET"):
            require_mode(bad)


@pytest.mark.parametrize("tags", ["xy", b"xy", None, 5, ["A b"], [None], [""]])
def test_several_tags_are_a_list_of_tags(tags: object) -> None:
    with pytest.raises(InvalidTag, match="tags is"):
        require_tags(tags)
    assert require_tags(["b", "a", "b"]) == ("b", "a")
