from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lull.agents.gateway.heads import AnswerHead, BadHead, Memo, RequestHead, at_ends, memo_of


def request(*lines: bytes, start: bytes = b"POST /v1/completions HTTP/1.1") -> bytes:
    return b"\r\n".join([start, b"Host: x", *lines]) + b"\r\n\r\n"


def test_what_passes_of_a_request() -> None:
    head = RequestHead(
        request(
            b"Authorization: Bearer k",
            b"X-Mine:odd",
            b"Connection: close, X-Hop",
            b"x-hop: 1",
            b"TE: trailers",
            b"Keep-Alive: timeout=3",
            b"X-Lull-Canary: 1",
            b"x_lull_canary: 1",
            b"Content-Length: 7",
        )
    )
    assert head.lines == [b"Authorization: Bearer k", b"X-Mine:odd"]
    assert (head.method, head.target, head.content_length) == (b"POST", b"/v1/completions", 7)
    assert not head.keep_alive


def test_what_passes_of_an_answer() -> None:
    raw = b"HTTP/1.1 200 All Right\r\nSet-Cookie: a\r\nset-cookie: b\r\nX-Lull-Canary: 1\r\nContent-Length: 2\r\n\r\n"
    head = AnswerHead(raw)
    assert head.lines == [b"Set-Cookie: a", b"set-cookie: b", b"X-Lull-Canary: 1"]
    assert (head.reason, head.content_length, head.verbatim, head.framed) == (b"All Right", 2, True, True)


@pytest.mark.parametrize("line", [b"Connection: keep-alive", b"Keep-Alive: timeout=5", b"Upgrade: h2c"])
def test_an_answer_with_what_is_only_for_its_connection_is_not_passed_as_it_came(line: bytes) -> None:
    head = AnswerHead(b"HTTP/1.1 200 OK\r\nX: 1\r\n%s\r\nContent-Length: 0\r\n\r\n" % line)
    assert (head.verbatim, head.lines) == (False, [b"X: 1"])


def test_an_answer_of_http10_is_not_passed_as_it_came() -> None:
    head = AnswerHead(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert not head.verbatim


def test_an_answer_that_ends_with_its_connection() -> None:
    assert not AnswerHead(b"HTTP/1.1 200 OK\r\nX: 1\r\n\r\n").framed
    assert AnswerHead(b"HTTP/1.1 204 No Content\r\nX: 1\r\n\r\n").framed


@pytest.mark.parametrize("coding", [b"gzip", b"gzip, chunked", b"chunked\r\nTransfer-Encoding: chunked"])
def test_transfer_codings_but_chunked_are_refused(coding: bytes) -> None:
    with pytest.raises(BadHead):
        RequestHead(request(b"Transfer-Encoding: " + coding))
    with pytest.raises(BadHead):
        AnswerHead(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: %s\r\n\r\n" % coding)


@pytest.mark.parametrize("start", [b"POST / HTTP/2.0", b"POST / HTTP/0.9", b"POST /", b"CONNECT x:1 HTTP/1.1"])
def test_versions_and_methods_that_are_not_spoken(start: bytes) -> None:
    with pytest.raises(BadHead):
        RequestHead(request(start=start))


def test_an_upgrade_is_not_taken_up_and_its_body_is_read() -> None:
    """Java's HttpClient asks for h2c with its first POST."""
    for lines in ([], [b"Content-Length: 3"], [b"Transfer-Encoding: chunked"]):
        head = RequestHead(
            request(b"Connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"HTTP2-Settings: A", *lines)
        )
        assert head.lines == []
        assert head.has_body == bool(lines)


@pytest.mark.parametrize(
    "line",
    [
        b"nocolon",
        b": empty",
        b"X : 1",
        b" X: 1",
        b"Upgrade: h2c\r\n X: 1",
        b"X: a\nY: b",
        b"X: a\rY: b",
        b"X: a\x00",
        b"X: a\x7f",
        b"X(: a",
        b"\xe9: a",
        b"Content-Length: 1\r\nContent-Length: 1",
        b"Content-Length: 1\r\nTransfer-Encoding: chunked",
        b"Content-Length: 1_0",
        b"Content-Length: 1111111111111111",
        b"Content-Length:",
    ],
)
def test_lines_that_are_refused(line: bytes) -> None:
    with pytest.raises(BadHead):
        RequestHead(request(line))
    with pytest.raises(BadHead):
        AnswerHead(b"HTTP/1.1 200 OK\r\n%s\r\n\r\n" % line)


@pytest.mark.parametrize("line", [b"nocolon", b"X: a\nContent-Length: 3", b"Transfer-Encoding : chunked", b"X: \x00"])
def test_what_llhttp_would_take_is_refused_all_the_same(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second judge needs no help of the first."""

    class Takes:
        def __init__(self, ends: Any) -> None:
            self.ends = ends

        def feed_data(self, data: bytes) -> None:
            self.ends.on_headers_complete()
            self.ends.on_message_complete()

    monkeypatch.setattr("lull.agents.gateway.heads.httptools.HttpRequestParser", Takes)
    assert RequestHead(request(b"X: 1")).lines == [b"X: 1"]
    with pytest.raises(BadHead):
        RequestHead(request(line))
    with pytest.raises(BadHead, match="whether a body follows"):
        RequestHead(request(b"Content-Length: 3"))


@pytest.mark.parametrize("name", [b"content_length", b"Transfer_Encoding", b"CONNECTION_", b"transfer_encoding"])
def test_what_some_servers_take_for_framing_does_not_pass(name: bytes) -> None:
    lines = RequestHead(request(name + b": 1", b"Content-Length: 0")).lines
    assert lines == ([name + b": 1"] if name == b"CONNECTION_" else [])


@pytest.mark.parametrize(
    "start", [b"HTTP/1.1 20 OK", b"HTTP/1.1 2000 OK", b"HTTP/2.0 200 OK", b"\r\nHTTP/1.1 200 OK", b""]
)
def test_first_lines_of_answers_that_are_refused(start: bytes) -> None:
    with pytest.raises(BadHead):
        AnswerHead(start + b"\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize("status", [100, 103, 204, 304])
@pytest.mark.parametrize("framing", [b"Content-Length: 3", b"Transfer-Encoding: chunked"])
def test_answers_that_have_no_body_whatever_they_say(status: int, framing: bytes) -> None:
    head = AnswerHead(b"HTTP/1.1 %d X\r\n%s\r\n\r\n" % (status, framing))
    assert (head.has_body, head.framed, head.verbatim) == (False, True, False)
    assert (head.chunked, head.content_length) == (False, None)


def test_heads_have_bounds() -> None:
    with pytest.raises(BadHead, match="longer"):
        RequestHead(request(b"X: " + b"a" * 40_000))
    with pytest.raises(BadHead, match="headers"):
        RequestHead(request(*(b"X-%d: a" % n for n in range(200))))


@given(data=st.lists(st.sampled_from([b"\r", b"\n", b"\r\n", b"a", b"\r\n\r\n"])).map(b"".join), cut=st.integers(0, 30))
def test_pieces_end_wherever_a_message_may(data: bytes, cut: int) -> None:
    """However the bytes come: no piece holds an empty line but at its end, and nothing is lost."""
    tail, seen = b"", b""
    for part in (data[:cut], data[cut:]):
        if not part:
            continue
        for piece in at_ends(tail, part):
            seen += piece
            inner = seen[: -len(piece)][-3:] + piece
            assert inner.find(b"\r\n\r\n") in (-1, len(inner) - 4)
        tail = (tail + part)[-3:]
    assert seen == data


# ---- heads that came before --------------------------------------------------------------------------------------

RAW = request(b"X: 1", b"content-length: 12", b"Y: 2")


def memo() -> Memo[RequestHead]:
    made = memo_of(RAW, RequestHead(RAW))
    assert made is not None
    return made


@pytest.mark.parametrize("length", [0, 7, 12, 123456])
def test_a_head_that_differs_in_its_length_alone_is_known(length: int) -> None:
    raw = RAW.replace(b"12", b"%d" % length)
    assert memo().match(raw + b"rest") == (length, len(raw))


@pytest.mark.parametrize(
    "raw",
    [
        RAW.replace(b"12", b""),
        RAW.replace(b"12", b"+1"),
        RAW.replace(b"12", b"1 2"),
        RAW.replace(b"12", b"1,2"),
        RAW.replace(b"12", b"0x2"),
        RAW.replace(b"12", b"\xb2"),
        RAW.replace(b"12", b"1" * 16),
        RAW.replace(b"12", b"12\r\nContent-Length: 13"),
        RAW.replace(b"12", b"12\r\nTransfer-Encoding: chunked"),
        RAW.replace(b"Y: 2", b"Y: 3"),
        RAW.replace(b"X: 1", b"X: 2"),
        RAW[:-1],
        RAW[:20],
        b"",
    ],
)
def test_any_other_head_is_read_anew(raw: bytes) -> None:
    assert memo().match(raw) is None


def test_a_head_with_two_places_for_its_length_is_not_remembered() -> None:
    raw = request(b"content-length: 1", b"X: a")
    assert memo_of(raw.replace(b"X: a", b"Content-Length: 2"), RequestHead(raw)) is None
    assert memo_of(request(b"content-length:1"), RequestHead(raw)) is None


def test_secrets_are_not_kept() -> None:
    from lull.agents.gateway import heads

    RequestHead(request(b"Authorization: Bearer k", b"X-Api-Key: k", b"Cookie: k", b"X-Seen: k"))
    assert b"X-Seen: k" in heads._request_lines
    assert not {line for line in heads._request_lines if line.endswith(b" k") and line != b"X-Seen: k"}


def test_lines_that_are_known_have_a_bound() -> None:
    from lull.agents.gateway import heads

    for n in range(3 * heads._LINES_MAX):
        RequestHead(request(b"X-Once: %d" % n))
        assert len(heads._request_lines) <= heads._LINES_MAX
