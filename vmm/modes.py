"""Which restore mode an allocation gets. The defaults are TensorRT-LLM's."""

from __future__ import annotations

from collections.abc import Mapping

from .driver import Driver
from .errors import UnsupportedMode
from .tags import KEEPS_CONTENTS, TAG_PATTERN, InvalidTag, RestoreMode


class ModeTable:
    def __init__(
        self, driver: Driver, restore_modes: Mapping[str, RestoreMode], *, prefer_pinned: bool | None = None
    ) -> None:
        """``prefer_pinned`` None: as the driver prefers. Raises for a mode that the device cannot honour."""
        self._device_uuid = driver.device_uuid
        self._unified = driver.unified
        pinned = driver.prefers_pinned if prefer_pinned is None else prefer_pinned
        self._default = RestoreMode.PINNED if pinned else RestoreMode.CPU
        self._modes = {"kv_cache": RestoreMode.NONE, **restore_modes}
        for tag, mode in restore_modes.items():
            self.choose(tag, mode)

    def choose(self, tag: str, mode: RestoreMode | None) -> RestoreMode:
        """``mode``, or what the table says for the tag. Raises InvalidTag and UnsupportedMode."""
        if not TAG_PATTERN.fullmatch(tag):
            raise InvalidTag(f"tag is {tag!r}; use lower-case letters, digits and underscores, at most 63")
        chosen = mode or self._modes.get(tag, self._default)
        if self._unified and chosen in KEEPS_CONTENTS:
            raise UnsupportedMode(
                f"restore mode {chosen} of tag {tag}: device {self._device_uuid} shares its memory with the host, "
                "so a backup would free nothing; use NONE or MEMSET and reload"
            )
        return chosen
