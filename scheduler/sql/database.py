"""Connections: what each database is told when one is opened, and what its errors mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from filelock import FileLock, Timeout
from sqlalchemy import URL, Connection, Engine, create_engine, event, exc, make_url, text

from ..errors import DatabaseUnavailable, InvalidRequest, SchedulerError, SchemaTooNew, StorageFull

T = TypeVar("T")

_BUSY_SECONDS: Final = 5.0  # SQLite: how long a connection waits for the write lock
_CONNECT_SECONDS: Final = 3
_STATEMENT_MILLISECONDS: Final = 15_000
_MIGRATION_LOCK: Final = 0x6C756C6C  # an advisory lock's number: "lull"
_MIGRATE_SECONDS_MAX: Final = 60.0
_MIGRATIONS: Final = Path(__file__).resolve().parents[2] / "migrations"

# The whole transaction was rolled back and may be run again: serialization failure, deadlock.
_AGAIN_SQLSTATES: Final = frozenset({"40001", "40P01"})
_FULL_SQLSTATES: Final = frozenset({"53100"})


def normalize_url(url: str) -> URL:
    """Raises InvalidRequest for a database that is neither SQLite nor PostgreSQL."""
    try:
        parsed = make_url(url)
    except (exc.ArgumentError, ValueError):
        # Not quoted: what cannot be parsed may hold a password anywhere.
        raise InvalidRequest(
            "database_url",
            "what is given is no address; for example sqlite:////var/lib/lull/lull.db or postgresql://user@host/lull",
        ) from None
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if parsed.database in (None, "", ":memory:"):
            raise InvalidRequest("database_url", "SQLite needs a file, for example sqlite:////var/lib/lull/lull.db")
        return parsed.set(drivername="sqlite")
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise InvalidRequest("database_url", f"{backend!r} is not supported; use sqlite:///… or postgresql://…")


def display_url(url: URL) -> str:
    return url.render_as_string(hide_password=True)


def is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def open_engine(url: URL, *, writes: bool, pool_size: int = 1) -> Engine:
    """An engine whose transactions begin as they must: SQLAlchemy's SQLite driver begins them late and deferred,
    and SQLite's busy time-out does not apply when a reader becomes a writer."""
    if not is_sqlite(url):
        options = f"-c statement_timeout={_STATEMENT_MILLISECONDS} -c lock_timeout=10000"
        return create_engine(
            url,
            pool_size=pool_size,
            max_overflow=0,
            pool_pre_ping=True,
            pool_timeout=_CONNECT_SECONDS,
            connect_args={
                "connect_timeout": _CONNECT_SECONDS,
                "options": options,
                "keepalives_idle": 10,
                "tcp_user_timeout": _STATEMENT_MILLISECONDS,
                "application_name": "lull",
            },
        )
    engine = create_engine(
        url,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=_CONNECT_SECONDS,
        connect_args={"timeout": _BUSY_SECONDS, "check_same_thread": False, "isolation_level": None},
    )

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "temp_store=MEMORY"):
            connection.execute(f"PRAGMA {pragma}").close()

    begin = "BEGIN IMMEDIATE" if writes else "BEGIN"

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


def may_run_again(error: exc.DBAPIError) -> bool:
    return getattr(error.orig, "sqlstate", None) in _AGAIN_SQLSTATES


def is_fault_of_the_request(error: exc.SQLAlchemyError) -> bool:
    """A value that the database cannot take, as opposed to a database that is not there."""
    return isinstance(error, exc.DataError | exc.IntegrityError | exc.ProgrammingError | exc.StatementError) and not (
        isinstance(error, exc.OperationalError | exc.InterfaceError | exc.InternalError)
    )


def refused(error: exc.SQLAlchemyError) -> InvalidRequest:
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return InvalidRequest("request", f"the database refuses a value: {lines[0] if lines else error}")


def unavailable(error: exc.SQLAlchemyError) -> DatabaseUnavailable:
    """The error that callers see; the driver's first line says what is wrong."""
    orig = getattr(error, "orig", None)
    lines = str(orig if orig is not None else error).strip().splitlines()
    line = lines[0] if lines else type(error).__name__
    if getattr(orig, "sqlstate", None) in _FULL_SQLSTATES or "disk is full" in line:
        return StorageFull(f"the database's disk is full: {line}")
    return DatabaseUnavailable(f"the database cannot be reached or used: {line}")


class ReadEngine:
    """Connections that only read, each in the thread that calls ``run``."""

    def __init__(self, url: URL, pool_size: int = 4) -> None:
        self._engine = open_engine(url, writes=False, pool_size=pool_size)

    def run(self, work: Callable[[Connection], T]) -> T:
        try:
            with self._engine.connect() as connection:
                if self._engine.dialect.name == "sqlite":
                    return work(connection)
                # One picture for all statements of the read, as SQLite gives by itself.
                with connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True):
                    return work(connection)
        except exc.SQLAlchemyError as error:
            if is_fault_of_the_request(error):
                raise refused(error) from error
            raise unavailable(error) from error

    def dispose(self) -> None:
        self._engine.dispose()


def alembic_config(url: URL) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["url"] = url
    return config


def migrate(url: URL) -> None:
    """To head, one process at a time. Raises SchemaTooNew and leaves a newer database as it is."""
    config = alembic_config(url)
    try:
        if is_sqlite(url):
            path = Path(str(url.database)).resolve()
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.migrate.lock", timeout=_MIGRATE_SECONDS_MAX):
                _migrate_locked(url, config)
        else:
            _migrate_locked(url, config)
    except (OSError, Timeout) as error:
        raise DatabaseUnavailable(f"the database cannot be opened: {error}") from error
    except exc.SQLAlchemyError as error:
        raise unavailable(error) from error


def _migrate_locked(url: URL, config: Config) -> None:
    script = ScriptDirectory.from_config(config)
    engine = open_engine(url, writes=True)
    try:
        with engine.begin() as connection:
            if not is_sqlite(url):
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})
            found = MigrationContext.configure(connection).get_current_heads()
            known = {revision.revision for revision in script.walk_revisions()}
            heads = script.get_heads()
            for revision in found:
                if revision not in known:
                    raise SchemaTooNew(revision, ", ".join(heads))
            if tuple(found) == tuple(heads):
                return
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        engine.dispose()


__all__ = ["ReadEngine", "SchedulerError", "alembic_config", "display_url", "migrate", "normalize_url", "open_engine"]
