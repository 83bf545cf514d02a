"""Each engine: whether it answers, whether it can honour its policy, and whether one is parked without a loan."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..engine_process import EngineProcess
from ..engines import make_adapter
from ..engines.base import EngineAdapter
from ..engines.ledger import Ledger
from ..errors import AgentError
from ..node_files import read_json
from ..processes import boot_id
from ..protocol.capabilities import Capabilities, refusal
from ..protocol.engine_kinds import MAY_END_AT_PARK
from ..protocol.policy import EnginePolicy
from ..protocol.wire import EngineState
from ..settings import AgentSettings, EngineSettings
from .findings import Finding, failed, not_applicable, ok, warning
from .scene import Check, Scene, engine_folder, engine_pids, engine_process, running_agent

_ENGINE_SECONDS: Final = 8.0
_SKEW_SECONDS_MAX: Final = 60.0
# `observe` of these may finish what an earlier agent began: here only what they wrote down is read.
_OBSERVING_ACTS: Final = frozenset({"sglang", "process", "cuda-checkpoint"})


class _Outside:
    """What a check sees of an engine from outside; it never starts or ends it."""

    def __init__(self, settings: AgentSettings, engine: EngineSettings) -> None:
        self._settings = settings
        self._engine = engine

    @property
    def incarnation(self) -> str | None:
        process = engine_process(self._settings, self._engine)
        return None if process is None else f"{process.boot_id}:{process.pid}:{process.start_ticks}"

    @property
    def process(self) -> EngineProcess | None:
        return None

    def pids(self) -> set[int]:
        return engine_pids(self._settings, self._engine)

    async def held_bytes(self) -> dict[str, int]:
        return {}


def adapter_of(settings: AgentSettings, engine: EngineSettings) -> tuple[EngineAdapter, Ledger]:
    outside = _Outside(settings, engine)
    ledger = Ledger(engine_folder(settings, engine) / "ledger.json", lambda: outside.incarnation)
    return make_adapter(engine, ledger, outside), ledger


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """``trouble``: why it cannot be asked; its other facts are nothing then."""

    name: str
    has_process: bool
    is_supervised: bool
    is_healthy: bool = False
    capabilities: Capabilities | None = None
    trouble: str = ""


async def _ask(settings: AgentSettings, engine: EngineSettings) -> EngineFacts:
    adapter, _ = adapter_of(settings, engine)
    has_process = engine_process(settings, engine) is not None
    is_supervised = engine.command is not None
    try:
        async with asyncio.timeout(_ENGINE_SECONDS):
            if not await adapter.healthy():
                return EngineFacts(engine.name, has_process, is_supervised)
            able = await adapter.capabilities()
    except TimeoutError:
        return EngineFacts(engine.name, has_process, is_supervised, trouble=f"no answer in {_ENGINE_SECONDS:g} s")
    except (AgentError, OSError) as error:
        return EngineFacts(engine.name, has_process, is_supervised, trouble=str(error))
    finally:
        await adapter.aclose()
    return EngineFacts(engine.name, has_process, is_supervised, True, able)


def judge_engine(facts: EngineFacts, policy: EnginePolicy, *, agent_runs: bool) -> Finding:
    name = facts.name
    if facts.trouble:
        return failed(f"it cannot be asked: {facts.trouble}", "see the engine's log", name)
    if not facts.has_process and not facts.is_healthy:
        if facts.is_supervised and not agent_runs:
            return not_applicable("it does not run; the agent starts it", name)
        way = (
            "see engine.log in its folder of the data directory"
            if facts.is_supervised
            else "start it: nobody else does"
        )
        return failed("it does not run", way, name)
    if not facts.is_healthy or facts.capabilities is None:
        return failed("it runs and does not answer its health route", "see the engine's log; it may still start", name)
    able = facts.capabilities
    if able.unsupported is not None:
        return failed(f"{able.engine} cannot be parked: {able.unsupported}", "see its section in docs/engines.md", name)
    cannot = refusal(able, policy)
    if cannot is not None:
        return failed(f"its policy cannot be honoured: {cannot}", f"lull engine policy set {name} …", name)
    if able.fragile is not None:
        return warning(f"{able.engine} is fragile: {able.fragile}", "see its section in docs/engines.md", name)
    notes = "".join(f"; {note}" for note in able.notes)
    return ok(f"{able.engine} answers and can honour its policy{notes}", name)


def policies(settings: AgentSettings) -> dict[str, EnginePolicy]:
    """What is in force: of the agent's file where it is locked there, else what the server last set."""
    kept: dict[str, EnginePolicy] = {}
    ids = read_json(settings.data_dir / "node.json")
    with journal_rows(settings, "SELECT engine_id, policy FROM policy") as rows:
        told = {str(engine_id): str(policy) for engine_id, policy in rows}
    for engine in settings.engines:
        text = told.get(str(ids.get(f"engine:{engine.name}")))
        kept[engine.name] = engine.policy
        if text is not None and not engine.policy_locked:
            with contextlib.suppress(ValueError):  # one of another version: the agent would refuse it too
                kept[engine.name] = EnginePolicy.model_validate_json(text)
    return kept


def check_engines(scene: Scene) -> list[Finding]:
    settings = scene.known
    if not settings.engines:
        return [not_applicable("no engine is named")]
    runs, wanted = running_agent(settings) is not None, policies(settings)

    async def ask_all() -> list[EngineFacts]:
        return await asyncio.gather(*(_ask(settings, engine) for engine in settings.engines))

    return [judge_engine(facts, wanted[facts.name], agent_runs=runs) for facts in asyncio.run(ask_all())]


# ---- the journal, and what is parked ----------------------------------------------------------------------------


@contextlib.contextmanager
def journal_rows(settings: AgentSettings, question: str) -> Generator[list[tuple[object, ...]]]:
    """Rows of the journal; none where there is no journal that can be read.

    A journal whose agent runs is read beside it, another one from a copy: opening it would make files beside it.
    """
    path = settings.data_dir / "journal.sqlite"
    with tempfile.TemporaryDirectory(prefix="lull-doctor-") as folder:
        try:
            if running_agent(settings) is None:
                for suffix in ("", "-wal"):
                    with contextlib.suppress(FileNotFoundError):
                        shutil.copyfile(f"{path}{suffix}", f"{folder}/journal.sqlite{suffix}")
                path = Path(folder) / "journal.sqlite"
            with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=2)) as db:
                rows = db.execute(question).fetchmany(10_000)
        except (sqlite3.Error, OSError, ValueError):
            rows = []
        yield rows


def engines_in_loans(settings: AgentSettings) -> set[str]:
    """Names of the engines of loans that are not over."""
    question = "SELECT json_extract(order_json, '$.engine_ids') FROM loan WHERE state <> 'closed'"
    ids = read_json(settings.data_dir / "node.json")
    with journal_rows(settings, question) as rows:
        text = " ".join(str(row[0]) for row in rows)
    return {engine.name for engine in settings.engines if str(ids.get(f"engine:{engine.name}", "?")) in text}


@dataclass(frozen=True, slots=True)
class ParkedFacts:
    """``trouble``: why it cannot be asked; nothing is known then. ``runs`` is false where nobody is there to ask."""

    name: str
    is_parked: bool
    words: str
    in_loan: bool
    trouble: str = ""
    runs: bool = True


async def _parked(settings: AgentSettings, engine: EngineSettings, lent: set[str]) -> ParkedFacts:
    adapter, ledger = adapter_of(settings, engine)
    in_loan = engine.name in lent
    try:
        if engine.kind in _OBSERVING_ACTS:
            if engine.kind == "process":
                ledger.incarnation = boot_id
                has_process = engine_process(settings, engine) is not None
                words = "ended by its park" if ledger.read().get("ending") and not has_process else ""
            else:
                words = str(ledger.read().get("state") or "")
            return ParkedFacts(engine.name, bool(words), words, in_loan)
        if engine.kind not in MAY_END_AT_PARK and engine_process(settings, engine) is None:
            return ParkedFacts(engine.name, False, "", in_loan, runs=False)
        async with asyncio.timeout(_ENGINE_SECONDS):
            seen = await adapter.observe()
        if seen.state in (EngineState.UNREACHABLE, EngineState.FAILED):
            return ParkedFacts(engine.name, False, "", in_loan, trouble=seen.detail or str(seen.state))
        return ParkedFacts(engine.name, seen.state is EngineState.PARKED, seen.state, in_loan)
    except TimeoutError:
        return ParkedFacts(engine.name, False, "", in_loan, trouble=f"no answer in {_ENGINE_SECONDS:g} s")
    except (AgentError, OSError) as error:
        return ParkedFacts(engine.name, False, "", in_loan, trouble=str(error))
    finally:
        await adapter.aclose()


def judge_parked(facts: ParkedFacts, *, agent_runs: bool) -> Finding:
    if facts.trouble:
        return warning(f"it cannot be asked whether it is parked: {facts.trouble}", "see the engine's log", facts.name)
    if not facts.runs:
        return not_applicable("it does not run", facts.name)
    if not facts.is_parked:
        return ok("it is not parked", facts.name)
    if not agent_runs:
        seen = f"it is parked ({facts.words}) and no agent runs to bring it back"
        return failed(seen, "start the agent: it brings it back", facts.name)
    if facts.in_loan:
        return ok(f"it is parked ({facts.words}) by a loan", facts.name)
    seen = f"it is parked ({facts.words}) and no loan has it"
    return failed(
        seen, "see the agent's log and `lull engine show`; an attached engine is woken by its owner", facts.name
    )


def check_parked(scene: Scene) -> list[Finding]:
    settings = scene.known
    if not settings.engines:
        return [not_applicable("no engine is named")]
    runs, lent = running_agent(settings) is not None, engines_in_loans(settings)

    async def ask_all() -> list[ParkedFacts]:
        return await asyncio.gather(*(_parked(settings, engine, lent) for engine in settings.engines))

    return [judge_parked(facts, agent_runs=runs) for facts in asyncio.run(ask_all())]


# ---- the clocks of engines that check signatures ------------------------------------------------------------------


def judge_engine_clock(name: str, skew_seconds: float | None) -> Finding:
    if skew_seconds is None:
        return not_applicable("it tells no time", name)
    if abs(skew_seconds) > _SKEW_SECONDS_MAX:
        seen = f"its clock is {skew_seconds:+.0f} s off this one: it will refuse signed calls, and is not parked"
        return failed(seen, "let chrony or systemd-timesyncd set the clock; look at the container's time", name)
    return ok("its clock agrees", name)


def check_engine_clocks(scene: Scene) -> list[Finding]:
    signed = [engine for engine in scene.known.engines if engine.kind == "trtllm"]

    async def ask(engine: EngineSettings) -> float | None:
        adapter, _ = adapter_of(scene.known, engine)
        try:
            async with asyncio.timeout(_ENGINE_SECONDS):
                return (await adapter.observe()).clock_skew_seconds
        except (TimeoutError, AgentError, OSError):
            return None
        finally:
            await adapter.aclose()

    async def ask_all() -> list[float | None]:
        return await asyncio.gather(*(ask(engine) for engine in signed))

    skews = asyncio.run(ask_all()) if signed else []
    found = [judge_engine_clock(engine.name, skew) for engine, skew in zip(signed, skews, strict=True)]
    return found or [not_applicable("no engine checks signatures")]


CHECKS = (
    Check("engines", "engines", "Each engine answers and can honour its policy.", check_engines, seconds_max=25.0),
    Check("parked", "engines", "No engine is parked without a loan.", check_parked, seconds_max=25.0),
    Check("engine_clock", "engines", "Clocks of engines that check signatures agree.", check_engine_clocks),
)
