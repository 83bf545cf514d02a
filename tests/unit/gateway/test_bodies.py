from __future__ import annotations

import pytest

from lull.agents.gateway.bodies import BadBody, BodyTooLong, ChunkedBody, SizedBody


def read(data: bytes, size: int, bytes_max: int = 100) -> tuple[bytes, bytes, bool]:
    """What a body holds that comes in segments of ``size`` bytes, and what is left of the last of them."""
    body = ChunkedBody(bytes_max)
    found = b""
    for at in range(0, len(data), size):
        piece, rest = body.take(data[at : at + size])
        found += piece
        if body.complete:
            return found, rest + data[at + size :], True
        assert not rest
    return found, b"", False


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_chunks_come_without_framing_and_what_follows_stays_whole(size: int) -> None:
    data = b"3;ext=1\r\nab\r\r\n4\r\n\r\n\r\n\r\n0\r\nX-Lull-Canary: 1\r\n\r\nPOST /next"
    assert read(data, size) == (b"ab\r\r\n\r\n", b"POST /next", True)


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    "data",
    [
        b"zz\r\n",
        b"\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b"0x1\r\n",
        b"1_0\r\n",
        b"1 \r\n",
        b" 1\r\n",
        b"000000001\r\na\r\n",
        b"1\na\r\n",
        b"1;a\nb\r\n",
        b"1;a\rb\r\n",
        b"1;\x00\r\n",
        b"1\r\nab\r\n",
        b"1\r\na\n",
        b"1\r\na\r\r",
        b"0\r\nnocolon\r\n\r\n",
        b"0\r\n X: 1\r\n\r\n",
        b"0\r\n\n\r\n",
        b"0\r\nX: a\nY: b\r\n\r\n",
    ],
)
def test_odd_chunks_are_refused(data: bytes, size: int) -> None:
    with pytest.raises(BadBody):
        read(data, size)


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_bounds(size: int) -> None:
    assert read(b"64\r\n" + b"a" * 100 + b"\r\n0\r\n\r\n", size) == (b"a" * 100, b"", True)
    for data in (b"64\r\n" + b"a" * 100 + b"\r\n1\r\n", b"ffffffff\r\n", b"1;" + b"a" * 8000 + b"\r\na\r\n"):
        with pytest.raises(BodyTooLong):
            read(data * 10, size)
    with pytest.raises(BodyTooLong):
        read(b"1;" + b"a" * 9000, size)
    with pytest.raises(BodyTooLong):
        read(b"0\r\n" + b"X: 1\r\n" * 20_000, size)


def test_a_sized_body_ends_where_it_says() -> None:
    body = SizedBody(5)
    assert body.take(b"ab") == (b"ab", b"")
    assert not body.complete
    assert body.take(b"cdePOST") == (b"cde", b"POST")
    assert body.complete
