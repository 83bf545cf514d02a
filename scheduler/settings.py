"""Settings of one server: flags before environment (``LULL_SERVER__KEY``) before TOML before defaults; frozen."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from platformdirs import user_data_path
from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ..agents.protocol.config_file import ConfigFileError, load_toml

CONFIG_PATH: Final = Path("/etc/lull/server.toml")
_PREFIX: Final = "LULL_SERVER__"
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]


class SettingsError(ValueError):
    """Which setting is wrong, where it was given, and what would be right."""


class ServerSettings(BaseSettings):
    """``load`` reads all sources. Unknown keys are errors in every one of them."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix=_PREFIX)

    data_dir: Path = Field(default_factory=lambda: user_data_path("lull") / "server")
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 7070
    database_url: str = ""  # not given: SQLite in data_dir
    database_url_file: Path | None = None  # a file that holds it, where it carries a password
    token_file: Path | None = None  # None: `token` in data_dir
    lease_seconds: Seconds = 30.0  # told to agents
    lease_grantor_seconds: Seconds = 45.0  # after this long without a sign of life a node is silent
    new_leader_grace_seconds: Seconds = 300.0  # the same, for nodes that this leader has not heard of yet
    leader_ttl_seconds: Seconds = 10.0
    tick_seconds: Annotated[float, Field(ge=0.05, le=60)] = 1.0
    body_bytes_max: Annotated[int, Field(ge=1024, le=64 << 20)] = 1 << 20
    requests_per_second_max: Annotated[float, Field(gt=0)] = 300.0  # of one principal, agents apart; inf: no limit
    queue_jobs_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000

    @model_validator(mode="after")
    def _check(self) -> ServerSettings:
        if self.lease_grantor_seconds <= self.lease_seconds:
            raise ValueError("lease_grantor_seconds: has to be longer than lease_seconds: the holder gives up first")
        if "database_url" in self.model_fields_set and self.database_url_file:
            raise ValueError("database_url: is given twice, also as database_url_file; leave one out")
        if not self.database_url:
            object.__setattr__(self, "database_url", self._default_database_url())  # frozen from here on
        return self

    def _default_database_url(self) -> str:
        if self.database_url_file is None:
            return f"sqlite:///{self.data_dir.absolute() / 'lull.db'}"
        try:
            return self.database_url_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"database_url_file: {self.database_url_file}: {error}") from None

    @property
    def token_path(self) -> Path:
        return self.token_file or self.data_dir / "token"

    @classmethod
    def load(
        cls, config: Path | None = None, *, environ: Mapping[str, str] | None = None, **flags: Any
    ) -> ServerSettings:
        """``flags`` that are None were not given. Raises SettingsError, ConfigFileError."""
        from_env = _from_environment(os.environ if environ is None else environ, cls.model_fields)
        path = config if config is not None else CONFIG_PATH
        from_file: dict[str, Any] = {}
        if config is not None or path.exists():
            load_toml(path, cls)  # checks it alone, so that an error names file, line and key
            from_file = tomllib.loads(path.read_text(encoding="utf-8"))
        given = {name: value for name, value in flags.items() if value is not None}
        try:
            return cls.model_validate({**from_file, **from_env, **given})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"])
            if name in given:
                where = f"--{name.replace('_', '-')}"
            elif name in from_env:
                where = f"{_PREFIX}{name.upper()}"
            else:
                where = name or str(path)
            text = str(first["msg"]).removeprefix("Value error, ")
            raise SettingsError(f"{where}: {text} (given: {first.get('input')!r})" if name else text) from None


def _from_environment(environ: Mapping[str, str], fields: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in environ.items():
        if not key.startswith(_PREFIX):
            continue
        name = key.removeprefix(_PREFIX).lower()
        if name not in fields:
            raise SettingsError(f"{key}: there is no such setting; known: {', '.join(sorted(fields))}")
        found[name] = value
    return found


__all__ = ["CONFIG_PATH", "ConfigFileError", "ServerSettings", "SettingsError"]
