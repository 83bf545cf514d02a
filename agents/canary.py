"""Whether two answers to the canary prompt are the same. Pure; fails closed."""

from __future__ import annotations

from typing import Any

from .engines.base import Answer


def difference(golden: Answer, now: Answer, logprob_tolerance: float) -> str | None:
    """How ``now`` differs from ``golden``, for people; None if it does not.

    Token ids and text have to be equal; log-probabilities, where the golden answer has them, within
    ``logprob_tolerance`` (as vLLM 0.32 judges its own snapshots). What golden had and ``now`` lacks is a difference.
    """
    if not (golden.text or golden.token_ids):
        return "the golden answer says nothing, so it proves nothing"
    if now.text != golden.text:
        return f"text {now.text[:80]!r} instead of {golden.text[:80]!r}"
    if golden.token_ids is not None and now.token_ids != golden.token_ids:
        return f"token ids {_short(now.token_ids)} instead of {_short(golden.token_ids)}"
    if golden.token_logprobs is not None:
        if now.token_logprobs is None or len(now.token_logprobs) != len(golden.token_logprobs):
            return "log-probabilities are missing"
        for index, (want, have) in enumerate(zip(golden.token_logprobs, now.token_logprobs, strict=True)):
            # `not <=` and not `>`: a NaN is a difference.
            if not abs(want - have) <= logprob_tolerance:
                return f"log-probability {have} of token {index} instead of {want} (tolerance {logprob_tolerance})"
    return None


def to_json(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "token_ids": None if answer.token_ids is None else list(answer.token_ids),
        "token_logprobs": None if answer.token_logprobs is None else list(answer.token_logprobs),
    }


def from_json(value: dict[str, Any]) -> Answer:
    ids, logprobs = value.get("token_ids"), value.get("token_logprobs")
    return Answer(
        str(value["text"]),
        None if ids is None else tuple(int(i) for i in ids),
        None if logprobs is None else tuple(float(p) for p in logprobs),
    )


def _short(ids: tuple[int, ...] | None) -> str:
    return "none" if ids is None else str(list(ids[:16]))
