"""Signed control requests, wire-compatible with TensorRT-LLM's runtime control (NVIDIA/TensorRT-LLM#19016).

The order of the checks and their words are that server's. A nonce is used up only by a request whose signature and time
are right; the store of nonces never forgets one early and refuses when it is full.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Final, cast

AUTH_HEADER: Final = "x-trtllm-runtime-control-auth"
TIMESTAMP_HEADER: Final = "x-trtllm-runtime-control-timestamp"
NONCE_HEADER: Final = "x-trtllm-runtime-control-nonce"
WINDOW_SECONDS: Final = 300
REPLAY_CAPACITY: Final = 4096

_DOMAIN: Final = b"trtllm-runtime-control-v1"
_METHOD: Final = re.compile(r"[A-Za-z]+")
_PATH: Final = re.compile(r"/(?:[^?#\n]*[^?#\n/])?")
_TIMESTAMP: Final = re.compile(r"[0-9]+")
_NONCE: Final = re.compile(r"[0-9a-f]{32}")

NO_KEY: Final = "Runtime control endpoints are enabled but no API key is configured."
NOT_AUTHENTIC: Final = "Invalid runtime control request authentication."
BAD_TIMESTAMP: Final = "Invalid runtime control request timestamp."
OUTSIDE_WINDOW: Final = "Runtime control request timestamp is outside the validity window."
NONCE_USED: Final = "Runtime control request nonce has already been used."
CACHE_FULL: Final = "Runtime control replay cache capacity exceeded."


class ControlAuthError(ValueError):
    """The request is not authentic, not in time, or not new. The text is what the wire shows."""


def sign(key: bytes, method: str, path: str, body: bytes, *, timestamp: int | str, nonce: str) -> dict[str, str]:
    """The three headers. ``path`` is the registered route: no root path, query or trailing slash."""
    text = str(timestamp)
    return {
        AUTH_HEADER: _signature(key, method, path, text, nonce, body),
        TIMESTAMP_HEADER: text,
        NONCE_HEADER: nonce,
    }


def new_headers(key: bytes, method: str, path: str, body: bytes, *, now: float) -> dict[str, str]:
    """Headers for one attempt: a nonce is never used twice, so a repeated request needs new ones."""
    return sign(key, method, path, body, timestamp=int(now), nonce=secrets.token_hex(16))


def keys_of(key: bytes | Sequence[bytes]) -> tuple[bytes, ...]:
    """One key or several; raises TypeError for what is none, without showing it."""
    given: object = key
    keys = tuple(cast("Sequence[object]", given)) if isinstance(given, list | tuple) else (given,)
    for one in keys:
        if not isinstance(one, bytes):
            raise TypeError(f"key is a {type(one).__name__}; it must be bytes (text.encode()), or a list of them")
    return cast("tuple[bytes, ...]", keys)


class RequestVerifier:
    """Accepts each authentic request once. Thread-safe: of two uses of one nonce exactly one is accepted."""

    def __init__(
        self,
        key: bytes | Sequence[bytes],
        *,
        window_seconds: int = WINDOW_SECONDS,
        capacity: int = REPLAY_CAPACITY,
    ) -> None:
        """Several keys are all valid, so that a key can be replaced without a pause. TypeError for what is no key."""
        self._keys = tuple(one for one in keys_of(key) if one)
        self._window_seconds = window_seconds
        self._capacity = capacity
        self._lock = threading.Lock()
        self._used: set[str] = set()
        self._expiries: list[tuple[int, str]] = []  # a heap: the next to forget is first

    def verify(self, method: str, path: str, headers: Mapping[str, str], body: bytes, *, now: float) -> None:
        """Returns for an authentic new request, else raises ControlAuthError. Header names in lower case."""
        if not self._keys:
            raise ControlAuthError(NO_KEY)
        try:
            auth, timestamp, nonce = headers[AUTH_HEADER], headers[TIMESTAMP_HEADER], headers[NONCE_HEADER]
        except KeyError:
            raise ControlAuthError(NOT_AUTHENTIC) from None
        presented = auth.encode("utf-8", "surrogateescape")
        signatures = [_signature(key, method, path, timestamp, nonce, body).encode() for key in self._keys]
        if not any(hmac.compare_digest(presented, signature) for signature in signatures):
            raise ControlAuthError(NOT_AUTHENTIC)
        try:
            signed_at = int(timestamp)
        except ValueError:  # more digits than Python converts
            raise ControlAuthError(BAD_TIMESTAMP) from None
        whole_now = int(now)
        if abs(whole_now - signed_at) > self._window_seconds:
            raise ControlAuthError(OUTSIDE_WINDOW)
        self._claim(nonce, signed_at + self._window_seconds, whole_now)

    def _claim(self, nonce: str, expiry: int, now: int) -> None:
        with self._lock:
            while self._expiries and self._expiries[0][0] < now:
                self._used.remove(heapq.heappop(self._expiries)[1])
            if nonce in self._used:
                raise ControlAuthError(NONCE_USED)
            if len(self._used) >= self._capacity:
                raise ControlAuthError(CACHE_FULL)
            self._used.add(nonce)
            heapq.heappush(self._expiries, (expiry, nonce))


def _signature(key: bytes, method: str, path: str, timestamp: str, nonce: str, body: bytes) -> str:
    if not key:
        raise ControlAuthError(NO_KEY)
    fields_ok = (
        _METHOD.fullmatch(method)
        and _PATH.fullmatch(path)
        and _TIMESTAMP.fullmatch(timestamp)
        and _NONCE.fullmatch(nonce)
    )
    if not fields_ok:
        raise ControlAuthError(NOT_AUTHENTIC)
    lines = (
        _DOMAIN,
        method.upper().encode(),
        path.encode("utf-8", "surrogateescape"),
        timestamp.encode(),
        nonce.encode(),
    )
    digest = hmac.new(key, b"".join(line + b"\n" for line in lines) + body, hashlib.sha256)
    return f"sha256={digest.hexdigest()}"
