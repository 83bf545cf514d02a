"""The OpenAI wire format, as much of it as this engine obeys; what it cannot obey it refuses. Pure.

Every answer carries the token ids beside the text, and log-probabilities if asked for: a canary compares them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from .model import Token

TOKENS_MAX_DEFAULT: Final = 16
LOGPROBS_MAX: Final = 5

# Fields that would change an answer, and the values at which they change nothing.
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "stop": ([], ""),
    "suffix": ("",),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
}


class BadRequest(ValueError):
    """``field`` is what is wrong with the body; ``status`` is what the client gets."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field = field
        self.status = status


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request."""

    chat: bool
    prompt: tuple[int, ...]
    tokens_max: int
    temperature: float
    seed: int
    logprobs: bool
    stream: bool
    stream_usage: bool


def parse_ask(body: bytes, *, chat: bool, model: str, context_tokens: int, seed: int) -> Ask:
    """``seed`` is the default one. Raises BadRequest."""
    fields = _object(body)
    asked_model = fields.get("model", model)
    if asked_model != model:
        raise BadRequest(f"The model `{asked_model}` does not exist; this engine serves `{model}`", "model", status=404)
    for name, neutral in _NEUTRAL.items():
        if fields.get(name) is not None and fields[name] not in neutral:
            raise BadRequest(f"{name}={fields[name]!r} is not supported by this engine; leave it out", name)
    prompt = _chat_prompt(fields.get("messages")) if chat else _prompt(fields.get("prompt"))
    tokens_name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    tokens_max = _integer(fields, tokens_name, TOKENS_MAX_DEFAULT, 1, 1 << 30)
    if len(prompt) + tokens_max > context_tokens:
        raise BadRequest(
            f"This model's maximum context length is {context_tokens} tokens, but {len(prompt)} in the prompt "
            f"and {tokens_name}={tokens_max} were requested; shorten one of them",
            tokens_name,
        )
    return Ask(
        chat=chat,
        prompt=prompt,
        tokens_max=tokens_max,
        temperature=_temperature(fields.get("temperature")),
        seed=_integer(fields, "seed", seed, 0, (1 << 63) - 1),
        logprobs=_logprobs(fields.get("logprobs"), chat=chat),
        stream=_boolean(fields, "stream"),
        stream_usage=_stream_usage(fields.get("stream_options")),
    )


def _object(body: bytes) -> dict[str, object]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadRequest("the body must be a JSON object")
    return cast("dict[str, object]", content)


def _prompt(value: object) -> tuple[int, ...]:
    items: list[object] = cast("list[object]", value) if isinstance(value, list) else [value]
    if len(items) == 1 and isinstance(items[0], str):  # a text, or a batch of one
        tokens = tuple(_encode(items[0], "prompt"))
    elif isinstance(value, list) and all(_is_integer(item, 0, 255) for item in items):
        tokens = tuple(cast("list[int]", items))
    else:
        raise BadRequest("prompt must be one string, or one list of token ids from 0 to 255", "prompt")
    if not tokens:
        raise BadRequest("prompt must not be empty", "prompt")
    return tokens


def _chat_prompt(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list with at least one message", "messages")
    lines: list[str] = []
    for index, message in enumerate(cast("list[object]", value)):
        role = cast("dict[str, object]", message).get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise BadRequest(f"messages[{index}] must be an object with role and content", "messages")
        content = _chat_content(cast("dict[str, object]", message).get("content"), index)
        lines.append(f"{role}: {content}\n")
    return tuple(_encode("".join(lines) + "assistant:", "messages"))


def _chat_content(value: object, index: int) -> str:
    """A string, or OpenAI's list of parts as long as all are text."""
    if isinstance(value, str):
        return value
    texts: list[object] = []
    if isinstance(value, list):
        parts = cast("list[object]", value)
        texts = [cast("dict[str, object]", part).get("text") if isinstance(part, dict) else None for part in parts]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise BadRequest(f"messages[{index}].content must be a string or a list of text parts", "messages")
    return "".join(cast("list[str]", texts))


def _encode(text: str, field: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # JSON may hold half a surrogate pair
        raise BadRequest(f"{field} is not valid Unicode: {error}", field) from error


def _temperature(value: object) -> float:
    """0 is greedy. The default is OpenAI's, yet repeatable, since the seed has a default too."""
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 2:
        raise BadRequest(f"temperature is {value!r}; it must be a number from 0 to 2", "temperature")
    return float(value)


def _stream_usage(options: object) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", "stream_options")
    return cast("dict[str, object]", options).get("include_usage") is True


def _logprobs(value: object, *, chat: bool) -> bool:
    if value is None:
        return False
    if isinstance(value, bool) if chat else _is_integer(value, 0, LOGPROBS_MAX):
        # In a completion 0 asks for the chosen token's too, without alternatives: all this engine gives.
        return bool(value) if chat else True
    expected = "true or false" if chat else f"an integer from 0 to {LOGPROBS_MAX}"
    raise BadRequest(f"logprobs is {value!r}; it must be {expected}", "logprobs")


def _integer(fields: Mapping[str, object], name: str, default: int, least: int, most: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if not _is_integer(value, least, most):
        raise BadRequest(f"{name} is {value!r}; it must be an integer from {least} to {most}", name)
    return cast("int", value)


def _is_integer(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _boolean(fields: Mapping[str, object], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} is {value!r}; it must be true or false", name)
    return value is True


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Shapes the answer to one request, whole or in chunks."""

    id: str
    model: str
    created: int
    ask: Ask

    def whole(self, tokens: Sequence[Token], cached_tokens: int | None = None) -> dict[str, Any]:
        """``cached_tokens``: of the prompt, where the engine keeps any."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", **self._tokens(tokens)}
        text = _text(tokens)
        choice |= {"message": {"role": "assistant", "content": text}} if self.ask.chat else {"text": text}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage(len(tokens), cached_tokens)}

    def opening(self) -> bytes:
        """A chat stream begins with the role; a completion stream with its first token."""
        if not self.ask.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        return sse({**self._head("chat.completion.chunk"), "choices": [choice]})

    def chunk(self, token: Token, *, last: bool) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None, **self._tokens([token])}
        choice |= {"delta": {"content": token.text}} if self.ask.chat else {"text": token.text}
        return sse({**self._head("chat.completion.chunk"), "choices": [choice]})

    def closing(self, count: int, cached_tokens: int | None = None) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self.ask.stream_usage:
            return done
        usage = self._usage(count, cached_tokens)
        return sse({**self._head("chat.completion.chunk"), "choices": [], "usage": usage}) + done

    def _head(self, chat_object: str) -> dict[str, Any]:
        kind = chat_object if self.ask.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _tokens(self, tokens: Sequence[Token]) -> dict[str, Any]:
        return {"token_ids": [token.id for token in tokens], "logprobs": self._logprobs(tokens)}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.ask.logprobs:
            return None
        if self.ask.chat:
            return {
                "content": [
                    {"token": token.text, "logprob": token.logprob, "bytes": [token.id], "top_logprobs": []}
                    for token in tokens
                ]
            }
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": None,
        }

    def _usage(self, count: int, cached_tokens: int | None) -> dict[str, Any]:
        prompt = len(self.ask.prompt)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
        }
        if cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        return usage


def sse(content: object) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def error_body(message: str, *, kind: str = "invalid_request_error", field: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}


def _text(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)
