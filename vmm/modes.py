"""Which restore mode an allocation gets. The defaults are TensorRT-LLM's."""

from __future__ import annotations

from collections.abc import Mapping, Set

from .driver import Driver
from .errors import UnsupportedMode
from .tags import KEEPS_CONTENTS, RestoreMode, require_mode, require_tag


class ModeTable:
    def __init__(
        self,
        driver: Driver,
        restore_modes: Mapping[str, RestoreMode],
        *,
        prefer_pinned: bool | None = None,
        immutable_tags: Set[str] = frozenset(),
    ) -> None:
        """``prefer_pinned`` None: as the driver prefers. Raises for a mode that the device cannot honour."""
        self._device_uuid = driver.device_uuid
        self._unified = driver.unified
        pinned = driver.prefers_pinned if prefer_pinned is None else prefer_pinned
        self._default = RestoreMode.PINNED if pinned else RestoreMode.CPU
        self._immutable_tags = immutable_tags
        self._modes = {"kv_cache": RestoreMode.NONE}
        for tag, mode in restore_modes.items():
            self._modes[tag] = self.choose(tag, require_mode(mode, f"restore_modes.{tag}"))
        for tag in immutable_tags:
            self.choose(tag, self._modes.get(tag))

    def choose(self, tag: str, mode: RestoreMode | None) -> RestoreMode:
        """``mode``, or what the table says for the tag. Raises InvalidTag and UnsupportedMode."""
        require_tag(tag)
        chosen = self._modes.get(tag, self._default) if mode is None else require_mode(mode)
        if tag in self._immutable_tags and chosen not in KEEPS_CONTENTS:
            raise UnsupportedMode(
                f"restore mode {chosen} of tag {tag}: the tag is immutable and this keeps no contents; "
                "give it CPU or PINNED, or leave it out of immutable_tags"
            )
        if self._unified and chosen in KEEPS_CONTENTS:
            raise UnsupportedMode(
                f"restore mode {chosen} of tag {tag}: device {self._device_uuid} shares its memory with the host, "
                "so a backup would free nothing; use NONE or MEMSET and reload"
            )
        return chosen
