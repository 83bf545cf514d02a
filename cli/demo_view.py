"""How the demo shows itself: live on a terminal, line by line elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from .demo_load import Record
from .demo_watch import Sample
from .quantities import format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..api.schemas import Loan

# What people see of a loan -> the step that begins it and the step that ends it.
PHASES: Final = (
    ("drain", "accepted", "in_flight_zero"),
    ("park", "park_sent", "parked_seen"),
    ("settle", "parked_seen", "settled"),
    ("job", "spawn_intent", "exit_recorded"),
    ("wake", "room_proved", "running_seen"),
    ("canary", "running_seen", "verified"),
    ("traffic", "gate_opening", "gate_opened"),
)
_BAR_CHARACTERS: Final = 48


def phase_times(loan: Loan | None) -> dict[str, tuple[float | None, float | None]]:
    """When each phase began and ended, since the loan's first step; None: not yet."""
    if loan is None or not loan.steps:
        return {name: (None, None) for name, _, _ in PHASES}
    first = min(step.monotonic_seconds for step in loan.steps)
    at = {str(step.step): step.monotonic_seconds - first for step in loan.steps}
    at.setdefault("accepted", 0.0)
    return {name: (at.get(start), at.get(end)) for name, start, end in PHASES}


def traffic_words(records: Sequence[Record]) -> str:
    """Answers and open requests of every model."""
    words: list[str] = []
    for model in sorted({record.model for record in records}):
        mine = [record for record in records if record.model == model]
        waiting = sum(1 for record in mine if record.ended is None)
        failed = sum(1 for record in mine if record.ended is not None and not record.answered)
        words.append(f"{model}: {sum(r.answered for r in mine)} answered, {waiting} waiting, {failed} failed")
    return "   ".join(words)


class PlainTeller:
    """One line for each thing that happened."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, sentence: str) -> None:
        if not self._quiet:
            print(sentence, file=sys.stderr, flush=True)

    def show(self, loan: Loan | None, sample: Sample, devices: Mapping[str, str], records: list[Record]) -> None:
        steps = loan.steps if loan else []
        if len(steps) > self._steps:
            first = min(step.monotonic_seconds for step in steps)
            for step in steps[self._steps :]:
                self.say(f"  {step.monotonic_seconds - first:8.3f} s  {step.step}")
            self._steps = len(steps)
            self.say(f"              {traffic_words(records)}")


class LiveTeller:
    """A picture that is drawn again and again: phases, who holds the devices, traffic."""

    def __init__(self, capacities: dict[str, int]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True)
        self._live = Live(console=self._console, refresh_per_second=8, transient=False)
        self._capacities = capacities  # by engine name

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def say(self, sentence: str) -> None:
        self._console.print(sentence, highlight=False, markup=False)

    def show(self, loan: Loan | None, sample: Sample, devices: Mapping[str, str], records: list[Record]) -> None:
        self._live.update(self._picture(loan, sample, devices, records))

    def _picture(
        self, loan: Loan | None, sample: Sample, devices: Mapping[str, str], records: list[Record]
    ) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        phases = Table.grid(padding=(0, 2))
        for name, (start, end) in phase_times(loan).items():
            if start is None:
                phases.add_row(Text("·", style="dim"), Text(name, style="dim"), "")
            elif end is None:
                phases.add_row(Text("▶", style="yellow"), Text(name, style="bold yellow"), f"since {start:.2f} s")
            else:
                phases.add_row(Text("✔", style="green"), name, format_duration(max(0.0, end - start)))
        bars = [self._bar(name, uuid, sample) for name, uuid in devices.items()]
        return Group(phases, Text(), *bars, Text(traffic_words(records)))

    def _bar(self, engine: str, uuid: str, sample: Sample) -> RenderableType:
        from rich.text import Text

        held, job = sample.engine_bytes(engine, uuid), sample.job_bytes(uuid)
        scale = _BAR_CHARACTERS / self._capacities[engine]
        engine_part, job_part = round(held * scale), round(job * scale)
        bar = Text(f"{engine:<8}")
        bar.append("█" * engine_part, style="cyan")
        bar.append("█" * job_part, style="magenta")
        bar.append("░" * max(0, _BAR_CHARACTERS - engine_part - job_part), style="dim")
        bar.append(f"  engine {held >> 20} MiB, job {job >> 20} MiB")
        return bar
