"""The body of an HTTP answer, read with a bound: whoever answers may send without end."""

from __future__ import annotations

import httpx


class AnswerTooLarge(Exception):
    """The text says how much was read."""


async def read_whole(response: httpx.Response, bytes_max: int) -> bytes:
    """The bytes as they came, of a response whose stream was not read yet. Raises AnswerTooLarge, and as httpx."""
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > bytes_max:
            raise AnswerTooLarge(f"the answer is larger than {bytes_max} bytes")
    return bytes(body)
