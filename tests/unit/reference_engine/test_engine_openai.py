from __future__ import annotations

import json
from typing import Any

import pytest

from lull.vmm.reference_engine.model import Token
from lull.vmm.reference_engine.openai import AnswerFormat, Ask, BadRequest, parse_ask


def ask(content: object, *, chat: bool = False) -> Ask:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return parse_ask(body, chat=chat, model="m", context_tokens=100, seed=9)


def test_a_completion_has_openais_defaults() -> None:
    parsed = ask({"prompt": "Hé"})
    assert parsed == Ask(False, tuple("Hé".encode()), 16, 1.0, 9, logprobs=False, stream=False, stream_usage=False)


def test_null_means_the_default() -> None:
    fields = ("max_tokens", "temperature", "seed", "logprobs", "stream", "stream_options", "stop", "n")
    assert ask({"prompt": "x", **dict.fromkeys(fields)}) == ask({"prompt": "x"})


def test_fields_that_change_nothing_may_be_given() -> None:
    neutral = {"n": 1, "best_of": 1, "echo": False, "stop": [], "top_p": 1.0, "frequency_penalty": 0, "user": "me"}
    assert ask({"prompt": "x", **neutral}) == ask({"prompt": "x"})


def test_a_prompt_may_be_tokens_or_a_batch_of_one() -> None:
    assert ask({"prompt": [72, 105]}).prompt == ask({"prompt": ["Hi"]}).prompt == (72, 105)


def test_a_conversation_becomes_one_prompt() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    parsed = ask({"messages": messages, "max_completion_tokens": 3}, chat=True)
    assert bytes(parsed.prompt) == b"system: be brief\nuser: ab\nassistant:"
    assert parsed.tokens_max == 3


@pytest.mark.parametrize(
    ("content", "field", "said"),
    [
        (b"", None, "not JSON"),
        (b"{", None, "not JSON"),
        (b"\xff", None, "not JSON"),
        ([], None, "JSON object"),
        ({}, "prompt", "prompt must be"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [256]}, "prompt", "0 to 255"),
        ({"prompt": [True]}, "prompt", "0 to 255"),
        ({"prompt": ["a", "b"]}, "prompt", "one string"),
        ({"prompt": [["a"]]}, "prompt", "one string"),
        ({"prompt": "\ud800"}, "prompt", "Unicode"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "from 1"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", "integer"),
        ({"prompt": "x", "max_tokens": 100}, "max_tokens", "maximum context length is 100"),
        ({"prompt": "x" * 90}, "max_tokens", "maximum context length is 100"),
        ({"prompt": "x", "temperature": -1}, "temperature", "0 to 2"),
        ({"prompt": "x", "temperature": "hot"}, "temperature", "0 to 2"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature", "0 to 2"),
        ({"prompt": "x", "seed": -1}, "seed", "from 0"),
        ({"prompt": "x", "logprobs": True}, "logprobs", "0 to 5"),
        ({"prompt": "x", "logprobs": 6}, "logprobs", "0 to 5"),
        ({"prompt": "x", "stream": "yes"}, "stream", "true or false"),
        ({"prompt": "x", "stream_options": 1}, "stream_options", "object"),
        ({"prompt": "x", "n": 2}, "n", "not supported"),
        ({"prompt": "x", "stop": ["\n"]}, "stop", "not supported"),
        ({"prompt": "x", "top_p": 0.5}, "top_p", "not supported"),
    ],
)
def test_a_bad_body_is_refused_with_the_field(content: object, field: str | None, said: str) -> None:
    with pytest.raises(BadRequest, match=said) as caught:
        ask(content)
    assert (caught.value.field, caught.value.status) == (field, 400)


@pytest.mark.parametrize("messages", [None, [], "hi", ["hi"], [{}], [{"role": "user"}], [{"role": 1, "content": "x"}]])
def test_bad_messages_are_refused(messages: object) -> None:
    with pytest.raises(BadRequest, match="messages"):
        ask({"messages": messages}, chat=True)


@pytest.mark.parametrize("content", [[], [{"type": "image_url"}], [7], 7])
def test_content_that_is_not_text_is_refused(content: object) -> None:
    with pytest.raises(BadRequest, match=r"messages\[0\].content"):
        ask({"messages": [{"role": "user", "content": content}]}, chat=True)


def test_another_model_is_not_found() -> None:
    with pytest.raises(BadRequest, match="`other` does not exist") as caught:
        ask({"prompt": "x", "model": "other"})
    assert caught.value.status == 404


def events(stream: bytes) -> list[Any]:
    """Parses server-sent events strictly: each is one data line and a blank one."""
    parts = stream.split(b"\n\n")
    assert parts[-1] == b""
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts[:-1])
    return [part[6:] for part in parts[:-1]]


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_says_what_the_whole_answer_says(chat: bool) -> None:
    content: dict[str, object] = {"logprobs": True, "messages": [{"role": "user", "content": "x"}]}
    parsed = ask(
        content if chat else {"prompt": "x", "logprobs": 1, "stream_options": {"include_usage": True}}, chat=chat
    )
    tokens = [Token(72, -0.5), Token(34, -1.25)]
    shaped = AnswerFormat("id-1", "m", 1800000000, parsed)
    whole = shaped.whole(tokens)
    chunks = shaped.opening() + b"".join(shaped.chunk(t, last=t is tokens[-1]) for t in tokens) + shaped.closing(2)
    *data, done = events(chunks)
    assert done == b"[DONE]"
    parts = [json.loads(part) for part in data]
    assert {part["id"] for part in parts} == {"id-1"}
    usages = [part["usage"] for part in parts if not part["choices"]]
    assert usages == ([] if chat else [whole["usage"]])
    choices = [part["choices"][0] for part in parts if part["choices"]]
    assert [choice["finish_reason"] for choice in choices][-2:] == [None, "length"]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == [72, 34]
    if chat:
        assert "".join(choice["delta"]["content"] for choice in choices) == 'H"'
        assert choices[0]["delta"]["role"] == "assistant"
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": 'H"'}
        assert [entry["logprob"] for entry in whole["choices"][0]["logprobs"]["content"]] == [-0.5, -1.25]
    else:
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"] == 'H"'
        assert whole["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -1.25]
