"""Flags before environment before file before defaults; every error says where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lull.agents.protocol.config_file import ConfigFileError
from lull.scheduler.requests import JobRequest
from lull.scheduler.settings import ServerSettings, SettingsError


def load(config: Path | None = None, environ: dict[str, str] | None = None, **flags: Any) -> ServerSettings:
    return ServerSettings.load(config, environ=environ or {}, **flags)


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('port = 1\nhost = "file"\nqueue_jobs_max = 7\n')
    found = load(file, {"LULL_SERVER__PORT": "2", "LULL_SERVER__HOST": "env", "HOME": "/"}, port=3, host=None)
    assert (found.port, found.host, found.queue_jobs_max, found.body_bytes_max) == (3, "env", 7, 1 << 20)


def test_the_database_is_sqlite_in_the_data_directory_unless_given(tmp_path: Path) -> None:
    assert load(data_dir=tmp_path).database_url == f"sqlite:///{tmp_path}/lull.db"
    assert load(data_dir=tmp_path).token_path == tmp_path / "token"
    assert load(database_url="postgresql://x/y").database_url == "postgresql://x/y"
    secret = tmp_path / "url"
    secret.write_text("postgresql://user:secret@x/y\n")
    assert load(database_url_file=secret).database_url == "postgresql://user:secret@x/y"
    with pytest.raises(SettingsError, match="database_url_file"):
        load(database_url_file=tmp_path / "none")
    with pytest.raises(SettingsError, match="given twice"):
        load(database_url_file=secret, database_url="postgresql://x/y")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("port = 1\nprot = 2\n", r"server.toml:2: prot: unknown key"),
        ("port = \n", "server.toml:1"),
        ("port = 70000", "port"),
    ],
)
def test_a_file_error_names_file_line_and_key(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(ConfigFileError, match=match):
        load(file)


def test_other_errors_name_their_source(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="LULL_SERVER__PROT: there is no such setting"):
        load(environ={"LULL_SERVER__PROT": "1"})
    with pytest.raises(SettingsError, match="LULL_SERVER__PORT"):
        load(environ={"LULL_SERVER__PORT": "many"})
    with pytest.raises(SettingsError, match="--tick-seconds"):
        load(tick_seconds=0)
    with pytest.raises(SettingsError, match="lease_grantor_seconds"):
        load(lease_seconds=60)
    with pytest.raises(ConfigFileError, match=r"none\.toml"):
        load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"argv": []}, "argv"),
        ({"argv": [""]}, "program"),
        ({"argv": ["a\0b"]}, "NUL"),
        ({"argv": ["a" * 200_000]}, "pass a file"),
        ({"argv": ["a"], "env": {"A=B": "1"}}, "environment variable"),
        ({"argv": ["a"], "workdir": "here"}, "absolute"),
        ({"argv": ["a"], "hbm": 5}, "hbm"),
        ({"argv": ["a"], "gpus": 0}, "gpus"),
    ],
)
def test_a_bad_request_names_the_field(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        JobRequest.model_validate(fields)
