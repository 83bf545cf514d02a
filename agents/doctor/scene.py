"""What every check is given: the agent's settings, as far as they can be read, and who runs where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from pydantic import ValidationError

from ..engine_process import listening_pid
from ..node_files import read_json
from ..processes import descendants, identity, is_same
from ..protocol.config_file import ConfigFileError, load_toml
from ..protocol.wire import ProcessIdentity
from ..settings import AgentSettings, EngineSettings
from .findings import Finding

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FilledIn:
    """What takes the place of the file's own keys, and who says so; ``assumed``: keys for which nobody does."""

    values: Mapping[str, str] = field(default_factory=dict[str, str])
    by: str = ""
    assumed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Scene:
    """``settings`` is None with a configuration that cannot be read; ``config_error`` then says what is wrong."""

    config: Path
    settings: AgentSettings | None
    config_error: str
    public_urls: tuple[str, ...] = ()  # where clients reach the engines, as the operator says
    filled_in: FilledIn = field(default_factory=FilledIn)
    _lock: Lock = field(default_factory=Lock)
    _looks: dict[str, Future[Any]] = field(default_factory=dict[str, "Future[Any]"])

    def once(self, what: str, look: Callable[[], T]) -> T:
        """What ``look`` sees, for all checks that ask for the same. Raises what it raised."""
        with self._lock:
            is_first = what not in self._looks
            seen: Future[T] = self._looks.setdefault(what, Future())
        if is_first:
            try:
                seen.set_result(look())
            except BaseException as error:  # noqa: BLE001  raised below, in every check that asked
                seen.set_exception(error)
        return seen.result()

    @property
    def known(self) -> AgentSettings:
        """For checks that are only asked with settings."""
        assert self.settings is not None, "a check that needs settings was asked without"
        return self.settings


def scene_of(config: Path, public_urls: Sequence[str] = (), filled_in: FilledIn | None = None) -> Scene:
    filled_in = filled_in or FilledIn()
    try:
        settings, error = load_toml(config, AgentSettings, filled_in.values), ""
    except ConfigFileError as wrong:
        settings, error = None, str(wrong)
    return Scene(config, settings, error, tuple(public_urls), filled_in)


@dataclass(frozen=True, slots=True)
class Check:
    """``about``: one line for the list of checks. Its probe reads and asks, and changes nothing.

    ``needs``: keys of the file without whose real values it says nothing.
    ``seconds_max``: after so long it counts as hanging, and the others are told without it.
    """

    name: str
    group: str
    about: str
    run: Callable[[Scene], list[Finding]]
    needs_settings: bool = True
    seconds_max: float = 15.0
    needs: tuple[str, ...] = ()


def read_identity(value: object) -> ProcessIdentity | None:
    try:
        return ProcessIdentity.model_validate(value)
    except ValidationError:
        return None


def running_agent(settings: AgentSettings) -> ProcessIdentity | None:
    """The agent that runs in the data directory of ``settings``, by its record and its identity."""
    agent = read_identity(read_json(settings.data_dir / "agent.json"))
    return agent if agent is not None and is_same(agent) else None


def engine_folder(settings: AgentSettings, engine: EngineSettings) -> Path:
    return settings.data_dir / "engines" / engine.name


def port_of(engine: EngineSettings) -> int:
    return int(engine.url.rsplit(":", 1)[1])


def engine_process(settings: AgentSettings, engine: EngineSettings) -> ProcessIdentity | None:
    """As the agent would find it: by its record, or by who listens on its port."""
    if engine.command is not None:
        known = read_identity(read_json(engine_folder(settings, engine) / "process.json").get("process"))
        if known is not None and is_same(known):
            return known
    pid = listening_pid(port_of(engine))
    return None if pid is None else identity(pid)


def engine_pids(settings: AgentSettings, engine: EngineSettings) -> set[int]:
    process = engine_process(settings, engine)
    return set() if process is None else {process.pid, *descendants(process.pid)}
