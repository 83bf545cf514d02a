"""The migrations give what ``tables.py`` says, on both databases, and a newer schema is left alone."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, text

from lull.agents.protocol.loans import LoanState
from lull.agents.protocol.wire import AttemptState, OccupancyKind
from lull.scheduler.errors import SchemaTooNew
from lull.scheduler.lifecycle import JobState
from lull.scheduler.sql import database
from lull.scheduler.store import Store
from lull.scheduler.tables import metadata


@pytest.fixture
def migrated(empty_database_url: str) -> Iterator[Engine]:
    url = database.normalize_url(empty_database_url)
    database.migrate(url)
    engine = database.open_engine(url, writes=True)
    yield engine
    engine.dispose()


def test_head_equals_the_tables(migrated: Engine) -> None:
    with migrated.begin() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_the_database_checks_the_enumerations_of_the_code(migrated: Engine) -> None:
    expected = {"jobs": JobState, "attempts": AttemptState, "loans": LoanState, "occupancy": OccupancyKind}
    for table, enum in expected.items():
        [check] = [str(each["sqltext"]) for each in inspect(migrated).get_check_constraints(table)]
        assert set(re.findall(r"'(\w+)'", check)) == {member.value for member in enum}, table


def test_migrating_again_changes_nothing(migrated: Engine, empty_database_url: str) -> None:
    database.migrate(database.normalize_url(empty_database_url))
    with migrated.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM leader")).scalar() == 1


def test_down_and_up_again(migrated: Engine) -> None:
    config = database.alembic_config(migrated.url)
    with migrated.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
        command.upgrade(config, "head")
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


async def test_a_newer_schema_is_refused_and_left_as_it_is(migrated: Engine, empty_database_url: str) -> None:
    with migrated.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaTooNew, match="9999"):
        await Store(empty_database_url).start()
    with migrated.begin() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9999"


def test_there_is_one_head_and_every_file_says_when_it_runs() -> None:
    script = ScriptDirectory.from_config(database.alembic_config(database.normalize_url("sqlite:////nowhere/x.db")))
    assert len(script.get_heads()) == 1
    for revision in script.walk_revisions():
        name = revision.path.rsplit("/", 1)[-1]
        assert re.fullmatch(rf"{revision.revision}_(pre|post)_[a-z0-9_]+\.py", name), name
