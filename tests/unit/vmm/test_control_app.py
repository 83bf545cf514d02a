from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from lull.vmm.control import CONTROL_PATHS, AsgiApp, control_app
from lull.vmm.control_client import ControlClient
from lull.vmm.errors import DriverError
from lull.vmm.host_driver import HostDriver
from lull.vmm.lifecycle import MemoryState
from lull.vmm.pool import Pool
from lull.vmm.runtime import Runtime
from lull.vmm.signing import NONCE_USED, NOT_AUTHENTIC, OUTSIDE_WINDOW, new_headers
from tests.memory import GRANULE_BYTES
from tests.waiting import wait_until_async

KEY = b"secret"
NOW = 1_800_000_000.5
JSON = {"content-type": "application/json"}


@pytest.fixture
def runtime(pool: Pool) -> Runtime:
    pool.allocate(GRANULE_BYTES, "model")
    pool.allocate(GRANULE_BYTES, "kv_cache")
    return Runtime(pool, drain_seconds_max=10)


@pytest.fixture
def app(runtime: Runtime) -> AsgiApp:
    return control_app(runtime, KEY, now=lambda: NOW, body_bytes_max=1000)


@pytest.fixture
async def client(app: AsgiApp) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        yield client


async def call(client: httpx.AsyncClient, method: str, path: str, body: bytes = b"", **extra: str) -> httpx.Response:
    headers = {**new_headers(KEY, method, path, body, now=NOW), **(JSON if body else {}), **extra}
    return await client.request(method, path, content=body, headers=headers)


async def release(client: httpx.AsyncClient, body: bytes = b"") -> httpx.Response:
    return await call(client, "POST", "/release_memory", body)


async def status(client: httpx.AsyncClient) -> Any:
    answer = await call(client, "GET", "/memory_status")
    assert answer.status_code == 200
    return answer.json()


async def test_park_and_wake(client: httpx.AsyncClient, driver: HostDriver) -> None:
    assert await status(client) == {"state": "running", "parked_tags": []}
    answer = await release(client, b'{"tags":["model","kv_cache"]}')
    assert (answer.status_code, answer.json()) == (200, {"status": "success"})
    assert await status(client) == {"state": "parked", "parked_tags": ["kv_cache", "model"]}
    assert driver.free_bytes() == driver.capacity_bytes
    answer = await call(client, "POST", "/resume_memory", b'{"tags":["model"]}')
    assert answer.json() == {"status": "success"}
    assert await status(client) == {"state": "parked", "parked_tags": ["kv_cache"]}
    assert (await call(client, "POST", "/resume_memory")).status_code == 200
    assert await status(client) == {"state": "running", "parked_tags": []}


@pytest.mark.parametrize("body", [b"", b"null", b"{}", b'{"tags": null}'])
async def test_bodies_that_mean_every_tag(client: httpx.AsyncClient, body: bytes) -> None:
    assert (await release(client, body)).status_code == 200
    assert len((await status(client))["parked_tags"]) == 11


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"tags":[]}', "Runtime memory tags must not be empty."),
        (b'{"tags":["bogus"]}', "Invalid runtime memory tag 'bogus'. Expected one of: "),
        (
            b'{"tags":["_no_capture_init_kv_cache"]}',
            "Runtime memory tag '_no_capture_init_kv_cache' is an initialization-only tag and cannot be released.",
        ),
    ],
)
async def test_bad_tags_are_400_with_an_object(client: httpx.AsyncClient, body: bytes, text: str) -> None:
    answer = await release(client, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(text)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"[]", "must be an object"),
        (b'"model"', "must be an object"),
        (b'{"tags":"model"}', "tags must be a list of strings"),
        (b'{"tags":[1]}', "tags must be a list of strings"),
        (b'{"tags":["model"],"level":1}', "unknown field(s) level"),
        (b'{"tags"', "the body is not JSON"),
        (b"\xff", "the body is not JSON"),
        (b"[" * 999, "the body is not JSON"),
    ],
)
async def test_bad_schema_is_400_with_a_string(client: httpx.AsyncClient, body: bytes, text: str) -> None:
    answer = await release(client, body)
    assert answer.status_code == 400
    assert text in answer.json()["error"]


async def test_bad_json_is_400_even_without_a_signature(client: httpx.AsyncClient) -> None:
    answer = await client.post("/release_memory", content=b"{", headers=JSON)
    assert answer.status_code == 400
    assert isinstance(answer.json()["error"], str)


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded"])
async def test_a_body_must_be_declared_as_json(client: httpx.AsyncClient, kind: str) -> None:
    answer = await call(client, "POST", "/release_memory", b"{}", **{"content-type": kind})
    assert answer.status_code == 400
    assert "must be application/json" in answer.json()["error"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/a+json"])
async def test_declarations_of_json(client: httpx.AsyncClient, kind: str) -> None:
    assert (await call(client, "POST", "/release_memory", b"{}", **{"content-type": kind})).status_code == 200


async def test_unsigned_is_401_with_a_detail(client: httpx.AsyncClient) -> None:
    for method, path in (("POST", "/release_memory"), ("POST", "/resume_memory"), ("GET", "/memory_status")):
        answer = await client.request(method, path)
        assert (answer.status_code, answer.json()) == (401, {"detail": NOT_AUTHENTIC})


async def test_an_old_signature_and_a_used_nonce_are_401(client: httpx.AsyncClient) -> None:
    old = new_headers(KEY, "GET", "/memory_status", b"", now=NOW - 301)
    answer = await client.get("/memory_status", headers=old)
    assert (answer.status_code, answer.json()) == (401, {"detail": OUTSIDE_WINDOW})
    headers = new_headers(KEY, "GET", "/memory_status", b"", now=NOW)
    assert (await client.get("/memory_status", headers=headers)).status_code == 200
    answer = await client.get("/memory_status", headers=headers)
    assert (answer.status_code, answer.json()) == (401, {"detail": NONCE_USED})


async def test_a_refused_operation_uses_its_nonce(client: httpx.AsyncClient) -> None:
    body = b'{"tags":[]}'
    headers = {**new_headers(KEY, "POST", "/release_memory", body, now=NOW), **JSON}
    assert (await client.post("/release_memory", content=body, headers=headers)).status_code == 400
    assert (await client.post("/release_memory", content=body, headers=headers)).status_code == 401


async def test_the_first_of_two_auth_headers_counts(client: httpx.AsyncClient) -> None:
    right = new_headers(KEY, "GET", "/memory_status", b"", now=NOW)
    wrong = ("X-TRTLLM-Runtime-Control-Auth", "sha256=0")
    answer = await client.get("/memory_status", headers=[*right.items(), wrong])
    assert answer.status_code == 200
    answer = await client.get("/memory_status", headers=[wrong, *right.items()])
    assert answer.status_code == 401


async def test_conflicts_are_409(client: httpx.AsyncClient) -> None:
    await release(client, b'{"tags":["kv_cache"]}')
    answer = await release(client, b'{"tags":["model"]}')
    assert answer.status_code == 409
    assert "already parked" in answer.json()["error"]["message"]


async def test_everything_else_is_500(client: httpx.AsyncClient, driver: HostDriver) -> None:
    await release(client, b'{"tags":["model"]}')
    borrowed = driver.create(driver.free_bytes())
    answer = await call(client, "POST", "/resume_memory")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].startswith("out of device memory")
    assert (await status(client))["state"] == "parked"
    driver.release(borrowed)
    assert (await call(client, "POST", "/resume_memory")).status_code == 200


async def test_failed_is_409_for_whoever_asks_again(client: httpx.AsyncClient, driver: HostDriver) -> None:
    driver.inject("unmap", DriverError("unmap", "injected"), nth_call=2)
    driver.inject("create", DriverError("create", "injected"))
    assert (await release(client)).status_code == 500
    answer = await release(client)
    assert answer.status_code == 409
    assert "while state is failed" in answer.json()["error"]["message"]
    assert (await status(client))["state"] == "failed"


async def test_a_body_too_large_is_413(client: httpx.AsyncClient) -> None:
    answer = await release(client, b'{"tags":["' + b"a" * 1000 + b'"]}')
    assert answer.status_code == 413
    assert answer.json() == {"error": "the body is larger than 1000 bytes"}


@pytest.mark.parametrize("length", [b"1001", b"100000000", b"9" * 5000])
async def test_a_body_that_is_announced_as_too_large_is_not_waited_for(app: AsgiApp, length: bytes) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body is read")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/release_memory", "headers": [(b"content-length", length)]}
    await app(scope, receive, send)
    assert (sent[0]["status"], (b"connection", b"close") in sent[0]["headers"]) == (413, True)


@pytest.mark.parametrize("path", sorted(CONTROL_PATHS))
async def test_a_trailing_slash_is_redirected_before_the_signature(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(f"{path}/")
    assert (answer.status_code, answer.headers["location"]) == (307, path)


async def test_other_methods_and_paths(client: httpx.AsyncClient) -> None:
    answer = await client.get("/release_memory")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert (await client.post("/memory_status")).status_code == 405
    assert (await client.get("/other")).json() == {"detail": "Not Found"}


async def test_under_a_root_path_the_registered_path_is_signed(app: AsgiApp) -> None:
    transport = httpx.ASGITransport(app, root_path="/deploy")
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        headers = new_headers(KEY, "GET", "/memory_status", b"", now=NOW)
        assert (await client.get("/deploy/memory_status", headers=headers)).status_code == 200
        answer = await client.get("/deploy/memory_status/")
        assert answer.headers["location"] == "/deploy/memory_status"


async def test_status_is_answered_during_a_park_that_its_client_has_left(
    client: httpx.AsyncClient, runtime: Runtime
) -> None:
    go_on = threading.Event()

    @runtime.on_release
    def hold(tags: tuple[str, ...]) -> None:
        assert go_on.wait(10)

    asking = asyncio.create_task(release(client, b'{"tags":["model"]}'))
    await wait_until_async(lambda: runtime.status().state is MemoryState.PARKING, 10, "parking")
    assert await status(client) == {"state": "parking", "parked_tags": []}
    answer = await release(client)
    assert answer.status_code == 409
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    go_on.set()
    await wait_until_async(lambda: runtime.status().state is MemoryState.PARKED, 10, "parked")


async def test_a_park_that_its_client_has_left_says_how_it_ended(
    client: httpx.AsyncClient, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()

    @runtime.on_release
    def fail(tags: tuple[str, ...]) -> None:
        assert go_on.wait(10)
        raise ZeroDivisionError("too late to tell")

    asking = asyncio.create_task(release(client))
    await wait_until_async(lambda: runtime.status().state is MemoryState.PARKING, 10, "parking")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    go_on.set()
    await wait_until_async(lambda: "too late to tell" in caplog.text, 10, "the log line")
    assert runtime.status().state is MemoryState.RUNNING


async def test_a_client_that_leaves_before_its_body(app: AsgiApp) -> None:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/release_memory", "headers": []}
    await app(scope, receive, send)
    assert sent[0]["status"] == 400


async def test_lifespan_and_websocket(app: AsgiApp) -> None:
    sent: list[Any] = []
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan"}, receive, send)
    await app({"type": "websocket"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]


@pytest.mark.parametrize("key", [b"", [], [b"new", b""]])
def test_without_a_key_there_are_no_routes(runtime: Runtime, key: Any) -> None:
    with pytest.raises(ValueError, match="key is empty"):
        control_app(runtime, key)
    with pytest.raises(ValueError, match="key is empty"):
        ControlClient("http://127.0.0.1:1", b"")


@pytest.mark.parametrize("key", ["secret", ["secret"], [b"new", "secret"], None, 7])
def test_a_key_is_bytes_and_is_not_shown(runtime: Runtime, key: Any) -> None:
    for make in (lambda: control_app(runtime, key), lambda: ControlClient("http://127.0.0.1:1", key)):
        with pytest.raises(TypeError, match="it must be bytes") as refused:
            make()
        assert "secret" not in str(refused.value)


def test_what_is_no_runtime_is_named() -> None:
    nothing: Any = None
    with pytest.raises(TypeError, match="runtime is None"):
        control_app(nothing, KEY)
