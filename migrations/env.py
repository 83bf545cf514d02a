"""Alembic's environment. The server hands over its connection; developers give LULL_SERVER__DATABASE_URL."""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import Connection

from lull.scheduler.sql import database
from lull.scheduler.tables import metadata


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        render_as_batch=connection.dialect.name == "sqlite",
        compare_type=True,
        compare_server_default=True,
        transaction_per_migration=False,
    )
    context.run_migrations()


def _main() -> None:
    if context.is_offline_mode():
        raise SystemExit("offline migrations are not supported: the steps look at the database")
    given = context.config.attributes.get("connection")
    if given is not None:
        _run(given)
        return
    url = os.environ.get("LULL_SERVER__DATABASE_URL")
    if not url:
        raise SystemExit("set LULL_SERVER__DATABASE_URL, for example sqlite:////tmp/lull.db")
    engine = database.open_engine(database.normalize_url(url), writes=True)
    with engine.begin() as connection:
        _run(connection)
    engine.dispose()


_main()
