"""Asks all checks at once, each for a bounded time, and tells them in the order of the list."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .findings import Finding, Status, failed, not_applicable, worst
from .scene import Check, FilledIn, Scene, scene_of


@dataclass(frozen=True, slots=True)
class Told:
    """One finding with the check that it is of."""

    check: str
    group: str
    status: Status
    subject: str
    seen: str
    way_out: str


@dataclass(frozen=True, slots=True)
class Examined:
    """``hanging``: the checks that did not end. Their threads may never do: the process has to end without them."""

    status: Status
    told: tuple[Told, ...]
    hanging: tuple[str, ...]


class _Asked:
    """One check in a thread of its own: a look at a dead file system blocks where nothing can interrupt it."""

    def __init__(self, check: Check, scene: Scene) -> None:
        self.check = check
        self._scene = scene
        self._findings: list[Finding] | None = None
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"doctor {check.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            found = self._look()
        except Exception as error:  # noqa: BLE001  told as this check's finding: the others are told all the same
            seen = f"the check itself failed: {type(error).__name__}: {error}"
            found = [failed(seen, "report it with this line; the other checks are not affected")]
        self._findings = found

    def _look(self) -> list[Finding]:
        if self.check.needs_settings and self._scene.settings is None:
            return [not_applicable("the configuration cannot be read")]
        unknown = [key for key in self.check.needs if key in self._scene.filled_in.assumed]
        if unknown:
            return [not_applicable(f"{', '.join(unknown)}: left to `lull up`, which does not run with this file")]
        return self.check.run(self._scene)

    def findings(self) -> list[Finding] | None:
        """None if it hangs."""
        self._thread.join(max(0.0, self._began + self.check.seconds_max - time.monotonic()))
        return self._findings


def examine(
    config: Path, checks: Sequence[Check], public_urls: Sequence[str] = (), filled_in: FilledIn | None = None
) -> Examined:
    """Takes no longer than the longest bound of ``checks``."""
    scene = scene_of(config, public_urls, filled_in)
    told: list[Told] = []
    hanging: list[str] = []
    for asked in [_Asked(check, scene) for check in checks]:
        check, found = asked.check, asked.findings()
        if found is None:
            hanging.append(check.name)
            seen = f"did not end within {check.seconds_max:g} s: what it looks at hangs"
            found = [failed(seen, f"find out why: {check.about.rstrip('.').lower()}")]
        told += [Told(check.name, check.group, one.status, one.subject, one.seen, one.way_out) for one in found]
    return Examined(worst(one.status for one in told), tuple(told), tuple(hanging))
