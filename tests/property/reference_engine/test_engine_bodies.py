from __future__ import annotations

import json
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from lull.vmm.reference_engine.openai import BadRequest, parse_ask

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
whole_numbers = ["max_tokens", "max_completion_tokens", "seed", "logprobs", "n"]
names = st.sampled_from(
    ["model", "prompt", "messages", "temperature", "stream", "stream_options", "stop", "top_p", "other", *whole_numbers]
)
messages = st.lists(st.fixed_dictionaries({"role": json_values, "content": json_values}), max_size=2)


@given(
    st.dictionaries(names, json_values, max_size=6),
    st.fixed_dictionaries({}, optional={"messages": messages}),
    st.booleans(),
)
def test_a_body_is_understood_within_the_bounds_or_refused(
    fields: dict[str, object], more: dict[str, object], chat: bool
) -> None:
    body = json.dumps({"prompt": "x", **fields, **more}).encode()
    with suppress(BadRequest):
        ask = parse_ask(body, chat=chat, model="m", context_tokens=50, seed=0)
        assert ask.prompt
        assert all(0 <= token <= 255 for token in ask.prompt)
        assert ask.tokens_max >= 1
        assert len(ask.prompt) + ask.tokens_max <= 50
        assert 0 <= ask.temperature <= 2


@given(st.binary(max_size=50), st.booleans())
def test_bytes_that_are_no_json_are_refused(body: bytes, chat: bool) -> None:
    with suppress(BadRequest):
        parse_ask(body, chat=chat, model="m", context_tokens=50, seed=0)
