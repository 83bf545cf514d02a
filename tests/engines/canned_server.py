"""A server that answers each path with one reply, whatever is asked, and the others with 404."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager


@asynccontextmanager
async def canned(bodies: Mapping[str, bytes], *, status: int = 200) -> AsyncIterator[str]:
    """Its URL. ``bodies`` are answered with ``status``."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split()[1].decode().partition("?")[0]
        code, body = (status, bodies[path]) if path in bodies else (404, b"")
        said = f"HTTP/1.1 {code} Canned\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(said.encode() + body)
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
