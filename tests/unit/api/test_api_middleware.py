"""The envelope around a small ASGI app: ids, tokens, body limits, the last barrier."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from lull.api.auth import Authenticator, new_token
from lull.api.middleware import Envelope, StreamCut

TOKEN = new_token()


async def _inner(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    match request.url.path:
        case "/boom":
            raise ValueError("secret detail")
        case "/cut":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise StreamCut("gone")
        case "/late":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise ValueError("after the start")
        case _:
            body = await request.body()
            await PlainTextResponse(f"{scope['state'].get('principal')} {len(body)}")(scope, receive, send)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    app = Envelope(_inner, authenticator=Authenticator.of(TOKEN, "ann"), body_bytes_max=1000, agent_body_bytes_max=2000)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://lull", headers={"Authorization": f"Bearer {TOKEN}"}
    ) as client:
        yield client


async def test_every_answer_has_an_id_and_a_harmless_one_is_kept(http: httpx.AsyncClient) -> None:
    assert len((await http.get("/")).headers["x-request-id"]) == 32
    assert (await http.get("/", headers={"X-Request-ID": "ab-1.2_3"})).headers["x-request-id"] == "ab-1.2_3"
    for evil in ("a b", "x" * 65, 'a"b', "é"):
        kept = (await http.get("/", headers={b"X-Request-ID": evil.encode()})).headers["x-request-id"]
        assert len(kept) == 32
        assert kept != evil


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer x", "Basic eHg6eQ==", pytest.param(TOKEN, id="token")])
async def test_without_the_token_nothing_is_answered(http: httpx.AsyncClient, header: str) -> None:
    answer = await http.get("/anything", headers={"Authorization": header})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["code"] == "unauthenticated"
    assert "x-request-id" in answer.headers


async def test_only_the_health_paths_are_open(http: httpx.AsyncClient) -> None:
    for path in ("/livez", "/readyz"):
        assert (await http.get(path, headers={"Authorization": ""})).text == "None 0"
    for path in ("/livez/", "/livez/x", "//livez", "/LIVEZ", "/api/v1/openapi.json", "/docs"):
        assert (await http.get(path, headers={"Authorization": ""})).status_code == 401


async def test_a_body_is_counted_whatever_it_declares(http: httpx.AsyncClient) -> None:
    assert (await http.post("/", content=b"x" * 1000)).text == "ann 1000"
    declared = await http.post("/", content=b"x" * 1001)
    assert declared.status_code == 413
    assert declared.json()["body_bytes_max"] == 1000
    assert declared.headers["connection"] == "close"

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 100

    assert (await http.post("/", content=chunks())).status_code == 413
    lying = await http.post("/", content=chunks(), headers={"Content-Length": "5"})
    assert lying.status_code == 413


async def test_agents_may_send_more_and_logs_any_length(http: httpx.AsyncClient) -> None:
    assert (await http.post("/api/v1/agent/reports", content=b"x" * 2000)).text == "ann 2000"
    assert (await http.post("/api/v1/agent/reports", content=b"x" * 2001)).status_code == 413
    assert (await http.post("/api/v1/agent/logs/abc", content=b"x" * 9000)).text == "ann 9000"
    assert (await http.post("/api/v1/agents/", content=b"x" * 1001)).status_code == 413


async def test_an_unforeseen_error_says_nothing_of_itself(
    http: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = await http.get("/boom", headers={"X-Request-ID": "find-me"})
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "secret" not in answer.text
    assert "find-me" in answer.json()["detail"]
    logged = capsys.readouterr()
    assert "secret detail" in logged.out + logged.err


@pytest.mark.parametrize("path", ["/cut", "/late"])
async def test_a_response_that_had_begun_is_left_incomplete(path: str) -> None:
    sent: list[str] = []

    async def send(message: object) -> None:
        sent.append(json.loads(json.dumps(message, default=str))["type"])

    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect"}

    app = Envelope(_inner, authenticator=Authenticator.of(TOKEN), body_bytes_max=1, agent_body_bytes_max=1)
    headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "query_string": b"", "server": None}
    await app(scope, receive, send)
    assert sent == ["http.response.start"]


async def test_a_websocket_is_refused() -> None:
    sent: list[object] = []

    async def send(message: object) -> None:
        sent.append(message)

    async def receive() -> dict[str, object]:
        return {"type": "websocket.connect"}

    app = Envelope(_inner, authenticator=Authenticator.of(TOKEN), body_bytes_max=1, agent_body_bytes_max=1)
    await app({"type": "websocket", "path": "/livez", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
