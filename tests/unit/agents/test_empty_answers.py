"""An answer that says nothing proves nothing: it is neither taken for golden nor compared with one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lull.agents.canary import difference
from lull.agents.engines.base import Answer
from lull.agents.engines.completion import ask_completion, read_completion
from lull.agents.engines.ollama import OllamaAdapter
from lull.agents.errors import EngineRefused
from lull.agents.protocol.policy import CanaryPolicy
from tests.engines.canned_server import canned

CANARY = CanaryPolicy(deadline_seconds=5)
EMPTY = [{"text": ""}, {"text": "", "token_ids": []}, {"text": "", "logprobs": {"token_logprobs": []}}, {"text": None}]


@pytest.mark.parametrize("choice", EMPTY)
async def test_a_completion_without_text_and_tokens_is_an_odd_one(choice: dict[str, Any]) -> None:
    body = json.dumps({"choices": [choice]}).encode()
    async with canned({"/v1/completions": body}) as url:
        with pytest.raises(EngineRefused, match="odd completion"):
            await ask_completion(url, "small", CANARY)


def test_tokens_without_text_are_an_answer() -> None:
    """Such as the one that ends it."""
    assert read_completion({"choices": [{"text": "", "token_ids": [2]}]}) == Answer("", (2,))


async def test_ollama_that_says_nothing_is_refused() -> None:
    async with canned({"/api/generate": b'{"response": "", "done": true}'}) as url:
        with pytest.raises(EngineRefused, match="odd answer"):
            await OllamaAdapter(url, "small").answer(CANARY)


def test_nothing_is_never_the_right_answer() -> None:
    """One that an earlier version wrote down, too."""
    assert difference(Answer(""), Answer(""), 1e-3) == "the golden answer says nothing, so it proves nothing"
    assert difference(Answer("", ()), Answer("", ()), 1e-3) is not None
    assert difference(Answer("", (2,)), Answer("", (2,)), 1e-3) is None
