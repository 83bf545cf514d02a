"""What passes: an allow-list of inference paths in their one exact spelling. Pure.

An engine's control routes (`/release_memory`, `/sleep`, `/collective_rpc`, ...) sit on the same port as inference,
often outside its API key (vLLM's development routes). So nothing that a client wrote is ever sent as a path: the
path is looked up here, and every other spelling of it is unknown.
"""

from __future__ import annotations

import json
from typing import Any, Final, cast

from pydantic_core import from_json

from .problems import Problem

INFERENCE_PATHS: Final = {
    path: path
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/rerank",
        "/v1/score",
        "/v1/classify",
        "/v1/pooling",
    )
}
MODELS_PATH: Final = "/v1/models"
LIVE_PATH: Final = "/livez"


def split_target(raw_target: str) -> tuple[str, str]:
    """Path and query as the client sent them; nothing is decoded."""
    path, _, query = raw_target.partition("?")
    return path, query.partition("#")[0]


def inference_path(method: str, path: str) -> str:
    """The path to send to the engine: one of ours, never the client's text."""
    known = INFERENCE_PATHS.get(path)
    if known is None:
        raise Problem(
            404, "unknown_path", f"This gateway has no {path[:200]!r}; it passes {', '.join(INFERENCE_PATHS)}."
        )
    if method != "POST":
        raise Problem(405, "method_not_allowed", f"{known} takes POST.", allow="POST")
    return known


def check_query(query: str) -> None:
    """The query is passed on as it came, so it may hold only what a request line may."""
    if not query.isascii() or any(not char.isprintable() or char == " " for char in query):
        raise Problem(400, "bad_query", "The query holds characters that have to be percent-encoded.")


# What the gateway reads of a request's body: the model, and whether the answer shall be a stream.
Asked = tuple[str, bool]


def _slowly(body: bytes | bytearray) -> Any:
    """The standard library takes half of a surrogate pair, which cut text may end with."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Problem(400, "invalid_json", f"The body is not JSON: {str(error)[:200]}") from None


def read_body(body: bytes | bytearray) -> Asked:
    try:
        parsed: Any = from_json(body)
    except ValueError:
        parsed = _slowly(body)
    if not isinstance(parsed, dict):
        raise Problem(400, "invalid_json", "The body is not a JSON object.")
    fields = cast("dict[str, Any]", parsed)
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise Problem(400, "model_missing", "model: name the model, one of those that GET /v1/models lists.")
    return model, fields.get("stream") is True
