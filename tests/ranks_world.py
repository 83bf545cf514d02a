"""Leader and ranks on a model of processes, memory and messages: every state is a value, and says what can happen next.

Channels keep their order. Faults (a message lost or doubled, a death, an act that goes wrong, a deadline that passes
while something could still be done) cost one of a budget each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lull.vmm.ranks_protocol import (
    Act,
    Done,
    Event,
    Failed,
    Kind,
    Leader,
    LeaderPhase,
    Message,
    Output,
    Phase,
    Rank,
    Send,
    Step,
    Undone,
    Verb,
)

ENDINGS = {
    Act.PREPARE: (Event.DID_PREPARE, Event.DID_NOT_PREPARE, Event.DID_NOTHING),
    Act.COMMIT: (Event.DID_COMMIT, Event.DID_NOT_COMMIT),
    Act.ABORT: (Event.DID_ABORT, Event.DID_NOT_ABORT),
}
# Memory after an act, for the operation that is under way: as before it, prepared, or as it wants it.
MEMORY = {
    Event.DID_PREPARE: "prepared",
    Event.DID_NOT_PREPARE: "old",
    Event.DID_NOTHING: "old",
    Event.DID_COMMIT: "new",
    Event.DID_NOT_COMMIT: "lost",
    Event.DID_ABORT: "old",
    Event.DID_NOT_ABORT: "lost",
}


@dataclass(frozen=True)
class Process:
    rank: Rank = field(default_factory=Rank)
    alive: bool = True
    linked: bool = True  # to the leader
    memory: str = "old"
    act: Act | None = None  # what its worker does now
    inbox: tuple[Message, ...] = ()
    outbox: tuple[Message, ...] = ()


@dataclass(frozen=True)
class World:
    leader: Leader
    processes: tuple[Process, ...]
    faults_left: int
    operations_left: int
    leader_alive: bool = True
    result: Output | None = None
    committed: bool = False

    @classmethod
    def new(cls, ranks: int, *, faults: int, operations: int = 1) -> World:
        return cls(Leader(frozenset(range(ranks))), (Process(),) * ranks, faults, operations)

    def quiet(self) -> bool:
        """Nothing happens any more unless somebody starts something."""
        return not any(name.startswith("go ") for name, _ in self.moves())

    def moves(self) -> Iterator[tuple[str, World]]:
        """Without faults ("go ...", "start") and with one ("fault ...")."""
        progress = False
        for name, world in self._progress():
            progress = True
            yield name, world
        if self._leader_waits() and not progress:
            yield "go expire", self._led(*self.leader.expire())
        if self.leader_alive and self.leader.phase is LeaderPhase.IDLE and self.operations_left:
            yield "start", self._start()
        if self.faults_left:
            spent = replace(self, faults_left=self.faults_left - 1)
            if self._leader_waits():
                yield "fault expire", spent._led(*self.leader.expire())
            if self.leader_alive:
                yield "fault leader dies", replace(spent, leader_alive=False)
            for number in range(len(self.processes)):
                yield from spent._faults(number)

    def _leader_waits(self) -> bool:
        return self.leader_alive and self.leader.phase not in (LeaderPhase.IDLE, LeaderPhase.FAILED)

    def _progress(self) -> Iterator[tuple[str, World]]:
        for number, process in enumerate(self.processes):
            if process.alive:
                if process.act is not None:
                    yield f"go {number} ends {process.act}", self._ended(number, ENDINGS[process.act][0])
                if process.act is Act.COMMIT and process.rank.phase is Phase.FAILED:
                    undone = replace(process, act=None, memory="old")  # it had not begun
                    yield f"go {number} does not commit", self._with(number, undone)
                if process.inbox:
                    message, *rest = process.inbox
                    heard = replace(process, inbox=tuple(rest))
                    yield f"go {number} hears {message.kind}", self._stepped(number, heard, *process.rank.hear(message))
                elif process.linked and not (self.leader_alive and self.leader.phase is not LeaderPhase.FAILED):
                    cut = replace(process, linked=False)
                    yield f"go {number} loses its leader", self._stepped(number, cut, *process.rank.lose_leader())
            if self.leader_alive and process.outbox:
                message, *rest = process.outbox
                world = self._with(number, replace(process, outbox=tuple(rest)))
                yield f"go leader hears {message.kind} of {number}", world._led(*self.leader.hear(number, message))
            elif self.leader_alive and not process.alive and number not in self.leader.lost and process.linked:
                world = self._with(number, replace(process, linked=False))
                yield f"go leader loses {number}", world._led(*self.leader.lose(number))

    def _faults(self, number: int) -> Iterator[tuple[str, World]]:
        process = self.processes[number]
        if not process.alive:
            return
        yield f"fault {number} dies", self._with(number, replace(process, alive=False, act=None, inbox=()))
        if process.act is not None:
            for ending in ENDINGS[process.act][1:]:
                yield f"fault {number} {ending}", self._ended(number, ending)
        if process.inbox:
            first, *rest = process.inbox
            lost = replace(process, inbox=tuple(rest))
            doubled = replace(process, inbox=(*process.inbox, first))
            yield f"fault {number} never hears {first.kind}", self._with(number, lost)
            yield f"fault {number} will hear {first.kind} twice", self._with(number, doubled)
        if process.outbox:
            first, *rest = process.outbox
            lost = replace(process, outbox=tuple(rest))
            doubled = replace(process, outbox=(*process.outbox, first))
            yield f"fault {first.kind} of {number} is lost", self._with(number, lost)
            yield f"fault {first.kind} of {number} comes twice", self._with(number, doubled)

    def _start(self) -> World:
        processes = tuple(replace(process, memory="old") for process in self.processes)
        world = replace(
            self, processes=processes, operations_left=self.operations_left - 1, result=None, committed=False
        )
        return world._led(*self.leader.start(Verb.RELEASE, None))

    def _with(self, number: int, process: Process) -> World:
        return replace(self, processes=(*self.processes[:number], process, *self.processes[number + 1 :]))

    def _led(self, leader: Leader, outputs: tuple[Output, ...]) -> World:
        world = replace(self, leader=leader)
        for output in outputs:
            if isinstance(output, Send):
                if output.message.kind is Kind.COMMIT:
                    world = replace(world, committed=True)
                to = world.processes[output.rank]
                if to.alive:
                    world = world._with(output.rank, replace(to, inbox=(*to.inbox, output.message)))
            else:
                assert isinstance(output, Done | Undone | Failed)
                world = replace(world, result=output)
        return world

    def _stepped(self, number: int, process: Process, rank: Rank, step: Step) -> World:
        process = replace(process, rank=rank)
        if step.act is Act.ABORT_AND_FAIL:
            process = replace(process, memory="old")
        elif step.act is not None and step.act is not Act.FAIL:
            assert process.act is None, "one act at a time"
            process = replace(process, act=step.act)
        if step.answer is not None:
            process = replace(process, outbox=(*process.outbox, Message(step.answer, rank.operation)))
        return self._with(number, process)

    def _ended(self, number: int, ending: Event) -> World:
        process = self.processes[number]
        memory = MEMORY[ending]
        if memory == "prepared" and process.rank.phase is Phase.FAILED:
            memory = "old"  # the runtime undoes what it prepared when it finds that it has failed
        process = replace(process, act=None, memory=memory)
        return self._stepped(number, process, *process.rank.end(ending))

    # -- what must hold

    def check(self) -> None:
        """In every state."""
        if not self.committed:
            assert all(process.memory != "new" for process in self.processes)
        if self.leader_alive and isinstance(self.result, Done) and self.result.changed:
            assert {process.memory for process in self.processes if process.alive} <= {"new"}

    def check_quiet(self) -> None:
        """When nothing happens any more."""
        living = [process for process in self.processes if process.alive]
        assert all(process.act is None for process in living)
        phases = {process.rank.phase for process in living}
        memory = {process.memory for process in living}
        if not self.leader_alive or isinstance(self.result, Failed):
            assert phases <= {Phase.FAILED}
        else:
            # Nothing hangs: whatever was started has ended, alike everywhere, and every rank can do the next.
            assert phases == {Phase.IDLE}
            assert len(living) == len(self.processes)
            assert memory == ({"new"} if self.result == Done(changed=True) else {"old"})
        if not self.committed and "lost" not in memory:
            assert memory <= {"old"}
