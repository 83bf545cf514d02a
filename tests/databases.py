"""Databases for tests: a private PostgreSQL for the session, one fresh database a test, and SQLite files.

``database_url`` gives each test that asks for it both, one after the other. A machine without PostgreSQL fails, with
what to install: a store that is tested on one database only is not tested.
"""

from __future__ import annotations

import glob
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest

from lull.scheduler.sql import database

_START_SECONDS_MAX = 60
_TRIES = 5  # for a free port that somebody takes before the server does


@dataclass
class Postgres:
    """A server of our own. ``stop`` and ``start`` are for tests of a database that goes away."""

    root: Path
    binaries: Path
    port: int = 0
    made: int = 0
    templates: dict[str, str] = field(default_factory=dict)

    def url(self, name: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}"

    def start(self) -> None:
        last = ""
        for _ in range(_TRIES):
            port = self.port or _free_port()
            # No fsync: durability is tested on SQLite, whose flushes we choose; here it would only cost time.
            options = (
                f"-p {port} -k {self.root} -c listen_addresses=127.0.0.1 -c fsync=off -c full_page_writes=off"
                " -c synchronous_commit=off -c shared_buffers=16MB -c max_connections=60"
            )
            command: list[str | Path] = [
                "pg_ctl",
                "-w",
                "-s",
                "-D",
                self.root / "data",
                "-l",
                self.root / "log",
                "-o",
                options,
                "start",
            ]
            done = self._run(command)
            if done.returncode == 0:
                self.port = port
                return
            last = done.stdout + (self.root / "log").read_text() if (self.root / "log").exists() else done.stdout
            if self.port:
                break
        pytest.fail(f"PostgreSQL did not start: {last[-2000:]}")

    def stop(self, mode: str = "immediate") -> None:
        self._run(["pg_ctl", "-w", "-s", "-m", mode, "-D", self.root / "data", "stop"])

    def create(self, template: str = "template1") -> str:
        """A fresh database; its name."""
        self.made += 1
        name = f"test_{self.made}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}".encode())
        return name

    def drop(self, name: str) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())

    def migrated_template(self) -> str:
        """A database at head, made once, from which tests get theirs."""
        if "head" not in self.templates:
            name = self.create()
            database.migrate(database.normalize_url(self.url(name)))
            self.templates["head"] = name
        return self.templates["head"]

    def _run(self, command: list[str | Path]) -> subprocess.CompletedProcess[str]:
        program, *rest = [str(part) for part in command]
        argv = [*_as_postgres(), str(self.binaries / program), *rest]
        with tempfile.TemporaryFile("w+") as output:  # a pipe would be inherited by the server and never end
            done = subprocess.run(
                argv, stdout=output, stderr=output, stdin=subprocess.DEVNULL, timeout=_START_SECONDS_MAX, cwd="/"
            )
            output.seek(0)
            return subprocess.CompletedProcess(argv, done.returncode, output.read())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _as_postgres() -> list[str]:
    """The server refuses to run as root."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups", "env", "HOME=/tmp"]


def _binaries() -> Path:
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))
    if found:
        return Path(found[-1]).parent
    on_path = shutil.which("initdb")
    if on_path is None:
        pytest.fail("PostgreSQL's initdb is missing; install it: apt-get install postgresql")
    return Path(on_path).parent


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A private server, gone at the end of the session."""
    binaries = _binaries()
    root = Path(tempfile.mkdtemp(prefix="lull-pg-"))
    server = Postgres(root, binaries)
    try:
        if os.geteuid() == 0:
            shutil.chown(root, "postgres", "postgres")
        done = server._run(
            [
                "initdb",
                "-D",
                root / "data",
                "-U",
                "postgres",
                "-A",
                "trust",
                "--no-sync",
                "-E",
                "UTF8",
                "--locale=C.UTF-8",
            ]
        )
        if done.returncode != 0:
            pytest.fail(f"initdb: {done.stdout[-2000:]}")
        server.start()
        yield server
    finally:
        if (root / "data" / "postmaster.pid").exists():
            server.stop()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    """A fresh database at head."""
    name = postgres.create(postgres.migrated_template())
    yield postgres.url(name)
    postgres.drop(name)


@pytest.fixture
def empty_postgres_url(postgres: Postgres) -> Iterator[str]:
    """A fresh database without any tables."""
    name = postgres.create()
    yield postgres.url(name)
    postgres.drop(name)


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "head.db"
    database.migrate(database.normalize_url(f"sqlite:///{path}"))
    return path


@pytest.fixture
def sqlite_url(migrated_sqlite: Path, tmp_path: Path) -> str:
    """A fresh file at head."""
    path = tmp_path / "lull.db"
    shutil.copyfile(migrated_sqlite, path)
    return f"sqlite:///{path}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest) -> str:
    """A fresh database at head, of each kind that is supported."""
    return str(request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url"))


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'empty.db'}"
    return str(request.getfixturevalue("empty_postgres_url"))
