"""What shall become of an engine's memory over a park, declared in one place, as TensorRT-LLM's SleepConfig does."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import cast

from .copier import THREADS_MAX
from .driver import Driver
from .errors import UnsupportedMode
from .pool import Pool
from .pool_like import PoolLike
from .runtime import DRAIN_SECONDS_DEFAULT, Runtime
from .tags import INIT_ONLY_TAGS, KEEPS_CONTENTS, InvalidTag, RestoreMode, require_mode, require_tag

_NONE_BY_DEFAULT = "kv_cache"


class InvalidSleepConfig(ValueError):
    """The text names the field, what is wrong with it, and what it may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepConfig:
    """Fields as in `Pool` and `Runtime`. Raises InvalidSleepConfig for values that say nothing or contradict."""

    restore_modes: Mapping[str, str] = field(default_factory=dict[str, str])
    """By tag: CPU, PINNED, NONE or MEMSET. Without one: NONE for kv_cache, else PINNED where preferred, else CPU."""
    prefer_pinned: bool | None = None
    require_locked: bool = False
    immutable_tags: Collection[str] = frozenset()
    verify_immutable: bool = False
    release_host_after_wake: bool = False
    copy_threads: int = 2
    drain_seconds_max: float = DRAIN_SECONDS_DEFAULT

    def __post_init__(self) -> None:
        for one in fields(self):
            _require_type(one.name, getattr(self, one.name))
        modes = {tag: _mode(tag, mode) for tag, mode in self.restore_modes.items()}
        for tag in modes:
            _require_tag("restore_modes", tag)
        for tag in self.immutable_tags:
            _require_tag("immutable_tags", tag)
            mode = modes.get(tag, RestoreMode.NONE if tag == _NONE_BY_DEFAULT else None)
            if mode is not None and mode not in KEEPS_CONTENTS:
                raise InvalidSleepConfig(
                    f"immutable_tags names {tag}, whose mode {mode} keeps no contents; give it CPU or PINNED"
                )
        if not 1 <= self.copy_threads <= THREADS_MAX:
            raise InvalidSleepConfig(f"copy_threads is {self.copy_threads}; it must be from 1 to {THREADS_MAX}")
        if not self.drain_seconds_max >= 0:  # nan is none either
            raise InvalidSleepConfig(f"drain_seconds_max is {self.drain_seconds_max}; it must not be negative")
        object.__setattr__(self, "restore_modes", MappingProxyType(modes))
        object.__setattr__(self, "immutable_tags", frozenset(self.immutable_tags))

    @classmethod
    def from_mapping(cls, document: Mapping[str, object]) -> SleepConfig:
        """From parsed YAML, TOML or JSON. Fields that it does not have are refused, wrong types too."""
        known = [one.name for one in fields(cls)]
        if not isinstance(cast("object", document), Mapping):
            raise InvalidSleepConfig(f"the document is {document!r}; it must be a mapping from field to value")
        if unknown := sorted(document.keys() - set(known)):
            raise InvalidSleepConfig(f"unknown field(s) {', '.join(unknown)}; expected some of {', '.join(known)}")
        return cls(**cast("dict[str, object]", dict(document)))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    def modes(self) -> dict[str, RestoreMode]:
        return {tag: RestoreMode(mode) for tag, mode in self.restore_modes.items()}

    def make_pool(self, driver: Driver) -> Pool:
        """Raises UnsupportedMode where the device cannot honour a mode."""
        return Pool(
            driver,
            restore_modes=self.modes(),
            prefer_pinned=self.prefer_pinned,
            require_locked=self.require_locked,
            immutable_tags=frozenset(self.immutable_tags),
            verify_immutable=self.verify_immutable,
            release_host_after_wake=self.release_host_after_wake,
            copy_threads=self.copy_threads,
        )

    def make_runtime(self, pools: PoolLike | Sequence[PoolLike]) -> Runtime:
        return Runtime(pools, drain_seconds_max=self.drain_seconds_max)


def _mode(tag: str, mode: str) -> RestoreMode:
    try:
        return require_mode(mode.upper() if isinstance(cast("object", mode), str) else mode)
    except UnsupportedMode:
        raise InvalidSleepConfig(f"restore_modes.{tag} is {mode!r}; expected one of {', '.join(RestoreMode)}") from None


def _require_tag(name: str, tag: str) -> None:
    if tag in INIT_ONLY_TAGS:
        raise InvalidSleepConfig(f"{name} names {tag}, which is used while an engine starts only and is never parked")
    try:
        require_tag(tag)
    except InvalidTag:
        raise InvalidSleepConfig(
            f"{name} names {tag!r}; a tag has lower-case letters, digits and underscores, at most 63"
        ) from None


def _require_type(name: str, value: object) -> None:
    checks = {
        "restore_modes": _is_text_mapping(value),
        "immutable_tags": _is_text_list(value),
        "prefer_pinned": value is None or isinstance(value, bool),
        "copy_threads": isinstance(value, int) and not isinstance(value, bool),
        "drain_seconds_max": isinstance(value, int | float) and not isinstance(value, bool),
    }
    words = {
        "restore_modes": "a mapping from tag to mode, such as {kv_cache: NONE}",
        "immutable_tags": "a list of tags",
        "prefer_pinned": "true, false or nothing",
        "copy_threads": "a whole number",
        "drain_seconds_max": "a number of seconds",
    }
    if not checks.get(name, isinstance(value, bool)):
        raise InvalidSleepConfig(f"{name} is {value!r}; it must be {words.get(name, 'true or false')}")


def _is_text_mapping(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    items = cast("Mapping[object, object]", value).items()
    return all(isinstance(key, str) and isinstance(one, str) for key, one in items)


def _is_text_list(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Collection):
        return False
    return all(isinstance(one, str) for one in cast("Collection[object]", value))
