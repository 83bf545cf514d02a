"""The canary of every engine that serves OpenAI's /v1/completions: greedy, asked past the gate."""

from __future__ import annotations

from typing import Any, Final, cast

from ..errors import EngineRefused
from ..protocol.policy import CanaryPolicy
from .base import Answer
from .http_call import accepted, call, json_object

CANARY_HEADER: Final = "x-lull-canary"


async def ask_completion(
    base_url: str, model: str, canary: CanaryPolicy, headers: dict[str, str] | None = None, **more: Any
) -> Answer:
    """``more``: fields of the request that only some engines know.

    Raises EngineRefused for any reply that is no completion, and as `call`.
    """
    asked: dict[str, Any] = {
        "model": model,
        "prompt": canary.prompt,
        "max_tokens": canary.tokens,
        "temperature": 0,
        "logprobs": 1,
    }
    asked |= more
    sent = {CANARY_HEADER: "1", **(headers or {})}
    reply = await call("POST", f"{base_url}/v1/completions", canary.deadline_seconds, body=asked, headers=sent)
    body = json_object(accepted(reply))
    try:
        return read_completion(body)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise EngineRefused(reply.status_code, f"odd completion: {error!r}") from error


def read_completion(body: dict[str, Any]) -> Answer:
    """Token ids and log-probabilities where the engine gives them. One with neither text nor tokens is none."""
    choice = body["choices"][0]
    ids = choice.get("token_ids")
    kept = cast("dict[str, Any]", choice.get("logprobs") or {})
    logprobs = kept.get("token_logprobs")
    text = choice["text"]
    if not isinstance(text, str) or not (text or ids):
        raise ValueError("it has neither text nor tokens")
    return Answer(
        text,
        None if ids is None else tuple(int(i) for i in ids),
        None if logprobs is None else tuple(float(p) for p in logprobs),
    )
