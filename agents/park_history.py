"""What parks of one engine were seen to do, kept from agent to agent and from process to process. Pure but for saving.

Everything is kept for the engine as it is configured: with another command line the history begins anew. Of each way of
parking it holds what was learned first (an alarm tells when a park frees much less), what the newest process freed in
its first park (which a process that has not parked yet is taken to do as well), and the last parks of the process
that runs now, with what that kept each time: a process that keeps more from park to park leaks, and only a restart
helps (vllm-project/vllm#21336, #32714).

A park that gave less than it had to is not what the engine can do: a rank may just have been late. It counts for the
whole policy only where every device released something and the next one gave the same; of a part it counts at once,
since there is the whole policy to fall back on. Either way until the next good park, and for its process only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from ..vmm.tags import RestoreMode
from .protocol.plans import Learned, ParkLearned

SAMPLES_MAX: Final = 5  # parks of which the seconds count
RESIDUALS_MAX: Final = 32  # parks of one process of which it is kept what stayed
FREED_SHARE_MIN: Final = 0.8  # of what was learned; less is an alarm
SAME_SHARE: Final = 0.05  # two parks that differ by no more of what they freed did the same
GROWTH_SHARE_MAX: Final = 0.05  # of what the engine holds awake; more, over the first park of a process, is an alarm
TRIALS_MAX: Final = 2  # of one way: one that ends the agent or the engine twice is not tried again

Record = dict[str, Any]
Bytes = Mapping[str, int]

_EMPTY: Final[Mapping[str, Any]] = {
    "first": {},
    "fresh": {},
    "incarnation": None,
    "freed": [],
    "residuals": [],
    "alarmed": {},
    "short": {},  # the last park that gave too little, unless a good one came after it
    "park_seconds": [],
    "wake_seconds": [],
    "parks": 0,
    "trials": 0,
    "trouble": None,
    "at": None,
}


class ParkHistory:
    """``read`` and ``remember`` are the engine's facts; ``key`` is how it is configured now, ``whole`` what its whole
    policy releases."""

    def __init__(
        self,
        read: Callable[[], Record],
        remember: Callable[[Record], None],
        key: Callable[[], str],
        incarnation: Callable[[], str | None],
        whole: Callable[[], Mapping[str, str]],
        margin_bytes: int = 0,
    ) -> None:
        self._read = read
        self._remember = remember
        self._key = key
        self._incarnation = incarnation
        self._whole = whole
        self._margin_bytes = margin_bytes

    # ---- what is known ------------------------------------------------------------------------------------------

    def learned(self) -> Learned:
        ways = [self._learned({**_EMPTY, **record}) for record in self._ways().values()]
        known = [way for way in ways if way.parks or way.freed_bytes or way.trouble]
        return Learned(ways=known, margin_bytes=self._margin_bytes)

    def freed_bytes(self, modes: Mapping[str, str]) -> dict[str, int]:
        """What a park of this way is relied on to free, by device; empty if nobody has seen one."""
        return self._learned(self._record(modes)).freed_bytes

    def residual_bytes(self, modes: Mapping[str, str]) -> dict[str, int]:
        return self._learned(self._record(modes)).residual_bytes

    def is_known(self, modes: Mapping[str, str]) -> bool:
        """It was seen, or it has to be left alone: nothing is to be learned by a trial."""
        record = self._record(modes)
        return bool(record["first"]) or record["trouble"] is not None

    def _learned(self, record: Record) -> ParkLearned:
        incarnation = self._incarnation()
        own = record["incarnation"] == incarnation and incarnation is not None
        fresh: Record = record["fresh"] or {}
        freed: list[dict[str, int]] = record["freed"] if own else [fresh["freed"]] if fresh else []
        residuals: list[dict[str, int]] = record["residuals"] if own else [fresh["residual"]] if fresh else []
        short: Record = record["short"]
        if short and short["incarnation"] == incarnation and incarnation is not None:
            if record["modes"] != {tag: str(mode) for tag, mode in self._whole().items()}:
                freed = [*freed, short["freed"]]
            elif short["times"] > 1:
                freed, residuals = [*freed, short["freed"]], [*residuals, short["residual"]]
        devices = {device for each in freed for device in each}
        return ParkLearned(
            modes={tag: RestoreMode(mode) for tag, mode in record["modes"].items()},
            freed_bytes={device: min(each.get(device, 0) for each in freed) for device in sorted(devices)},
            residual_bytes=residuals[-1] if residuals else {},
            residual_first_bytes=residuals[0] if residuals else {},
            park_seconds=_usual(record["park_seconds"]),
            wake_seconds=_usual(record["wake_seconds"]),
            parks=record["parks"],
            seen_at=record["at"],
            trouble=record["trouble"],
        )

    # ---- what was seen ------------------------------------------------------------------------------------------

    def try_begins(self, modes: Mapping[str, str]) -> bool:
        """Written before a trial park; False if this way was tried too often already."""
        record = self._record(modes)
        record["trials"] += 1
        too_often = bool(record["trials"] > TRIALS_MAX)
        if too_often:
            record["trouble"] = f"{TRIALS_MAX} trials of it were not finished"
        self._write(modes, record)
        return not too_often

    def went_wrong(self, modes: Mapping[str, str], why: str) -> None:
        record = self._record(modes)
        record["trouble"] = why[:500]
        self._write(modes, record)

    def forgive(self) -> None:
        """Ways that went wrong are as if nobody had tried them."""
        ways = self._ways()
        kept = {name: record for name, record in ways.items() if record["trouble"] is None}
        if len(kept) < len(ways):
            self._remember({"of": self._key(), "ways": kept})

    def parked(
        self, modes: Mapping[str, str], freed: Bytes, residual: Bytes, *, seconds: float | None, at: float
    ) -> None:
        """The memory of a park was proved to be as it is now. ``seconds``: None where an agent ended meanwhile."""
        record, incarnation = self._record(modes), self._incarnation()
        if incarnation is None or record["incarnation"] != incarnation:
            record |= {"incarnation": incarnation, "freed": [], "residuals": [], "alarmed": {}}
            record["fresh"] = {"freed": dict(freed), "residual": dict(residual)}
        record["first"] = record["first"] or dict(freed)
        record["freed"] = [*record["freed"], dict(freed)][-SAMPLES_MAX:]
        record["residuals"] = _shortened([*record["residuals"], dict(residual)])
        record |= {"parks": record["parks"] + 1, "at": at, "short": {}}
        if seconds is not None:
            record["park_seconds"] = [*record["park_seconds"], seconds][-SAMPLES_MAX:]
        self._write(modes, record)

    def fell_short(self, modes: Mapping[str, str], freed: Bytes, residual: Bytes, *, released: bool) -> None:
        """A park gave less than it had to. ``released``: something on every device, and it was at rest."""
        record, incarnation = self._record(modes), self._incarnation()
        before: Record = record["short"]
        again = bool(before) and incarnation is not None and before["incarnation"] == incarnation
        same = again and before["released"] and released and _is_same(before["freed"], freed)
        record["short"] = {
            "incarnation": incarnation,
            "freed": dict(freed),
            "residual": dict(residual),
            "released": released,
            "times": before["times"] + 1 if same else 1,
        }
        self._write(modes, record)

    def woken(self, modes: Mapping[str, str], seconds: float) -> None:
        """The last park of this way ended with a right answer, ``seconds`` after the resume call."""
        record = self._record(modes)
        record["wake_seconds"] = [*record["wake_seconds"], seconds][-SAMPLES_MAX:]
        self._write(modes, record)

    # ---- alarms -------------------------------------------------------------------------------------------------

    def too_little(self, modes: Mapping[str, str], freed: Bytes) -> dict[str, dict[str, int]]:
        """Devices on which a park freed much less than was learned; asked before `parked`."""
        return {
            device: {"learned_bytes": learned, "freed_bytes": freed.get(device, 0)}
            for device, learned in self._record(modes)["first"].items()
            if freed.get(device, 0) < learned * FREED_SHARE_MIN
        }

    def growth(self, modes: Mapping[str, str], footprint: Bytes) -> dict[str, dict[str, Any]]:
        """Devices on which this process keeps more with every park; each is told again once it has grown as much again.

        Asked after `parked`.
        """
        record = self._record(modes)
        residuals: list[dict[str, int]] = record["residuals"]
        grown: dict[str, dict[str, Any]] = {}
        for device, now in (residuals[-1] if residuals else {}).items():
            first, step = residuals[0].get(device, 0), max(1, int(footprint.get(device, 0) * GROWTH_SHARE_MAX))
            if now - first < step or now < record["alarmed"].get(device, first) + step:
                continue
            grown[device] = {
                "first_bytes": first,
                "now_bytes": now,
                "parks": len(residuals),
                "residual_bytes": [each.get(device, 0) for each in residuals],
            }
        if grown:
            record["alarmed"] = {**record["alarmed"], **{device: of["now_bytes"] for device, of in grown.items()}}
            self._write(modes, record)
        return grown

    # ---- the file -----------------------------------------------------------------------------------------------

    def _ways(self) -> dict[str, Record]:
        kept = cast("Record", self._read().get("parks", {}))
        return cast("dict[str, Record]", kept.get("ways", {})) if kept.get("of") == self._key() else {}

    def _record(self, modes: Mapping[str, str]) -> Record:
        """A copy; one that says nothing where nothing is known."""
        of: Record = {"modes": {tag: str(mode) for tag, mode in sorted(modes.items())}}
        return {**_EMPTY, **of, **self._ways().get(_name(modes), {})}

    def _write(self, modes: Mapping[str, str], record: Record) -> None:
        self._remember({"of": self._key(), "ways": {**self._ways(), _name(modes): record}})


def _name(modes: Mapping[str, str]) -> str:
    return ",".join(f"{tag}={mode}" for tag, mode in sorted(modes.items()))


def _is_same(before: Bytes, now: Bytes) -> bool:
    return all(
        abs(now.get(device, 0) - before.get(device, 0)) <= before.get(device, 0) * SAME_SHARE
        for device in {*before, *now}
    )


def _shortened(residuals: list[dict[str, int]]) -> list[dict[str, int]]:
    """The first one stays: growth is counted from it."""
    return residuals if len(residuals) <= RESIDUALS_MAX else [residuals[0], *residuals[-RESIDUALS_MAX + 1 :]]


def _usual(seconds: list[float]) -> float | None:
    """The middle of the last ones, the dearer of two: one slow park does not change a plan."""
    return round(sorted(seconds)[len(seconds) // 2], 3) if seconds else None
