"""A real store on SQLite, the app over ASGI, the app behind a real socket, and a node that speaks the wire."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from lull.api.app import create_app
from lull.api.auth import Authenticator, new_token
from lull.api.relays import RelayTimes
from lull.api.services import Services, StreamTimes
from lull.scheduler.store import Store
from tests.waiting import wait_until_async
from tests.wire_node import WireNode

TIMES = StreamTimes(
    keep_alive=0.1,
    heartbeat=0.1,
    long_poll=0.3,
    relay=RelayTimes(answer_seconds_max=1, silence_seconds_max=1, stalled_seconds_max=5),
)


@pytest.fixture
def token() -> str:
    return new_token()


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database at the newest schema, to be copied: migrating takes longer than most tests."""
    path = tmp_path_factory.mktemp("migrated") / "lull.db"

    async def migrate() -> None:
        made = Store(f"sqlite:///{path}")
        await made.start()
        await made.close()

    asyncio.run(migrate())
    return path


@pytest.fixture
async def store(tmp_path: Path, migrated_database: Path) -> AsyncIterator[Store]:
    shutil.copy(migrated_database, tmp_path / "lull.db")
    made = Store(f"sqlite:///{tmp_path / 'lull.db'}", queue_jobs_max=5)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
async def app(store: Store, token: str) -> AsyncIterator[FastAPI]:
    made = create_app(store, Authenticator.of(token), times=TIMES)
    async with made.router.lifespan_context(made):
        yield made


@pytest.fixture
async def http(app: FastAPI, token: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://lull/api/v1",
        headers={"Authorization": f"Bearer {token}"},
    ) as client:
        yield client


@pytest.fixture
def services(app: FastAPI) -> Services:
    return app.state.services  # type: ignore[no-any-return]


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@pytest.fixture
async def live_url(app: FastAPI) -> AsyncIterator[str]:
    """The app behind a socket, in this event loop: httpx's ASGI transport cannot stream."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=1
    )
    server = _QuietServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await wait_until_async(lambda: server.started, 10, "the server to start")
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    app.state.services.topics.stop()
    server.should_exit = True
    await asyncio.wait_for(serving, 10)


@pytest.fixture
async def live(live_url: str, token: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"{live_url}/api/v1", headers={"Authorization": f"Bearer {token}"}, timeout=10
    ) as client:
        yield client


@pytest.fixture
async def node(http: httpx.AsyncClient) -> WireNode:
    """A registered node with one device and no engine."""
    made = WireNode(http)
    await made.register()
    return made
