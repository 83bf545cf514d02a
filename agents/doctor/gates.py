"""Gates that are somebody else's: HAProxy, Kubernetes, a webhook. They are asked, as the agent would ask them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from ..errors import AgentError
from ..gates import make_gate
from ..gates.base import GateRouteUnknown
from ..gates.gateway import GatewayGate
from ..node_files import read_json
from ..protocol.wire import GateState
from ..settings import AgentSettings, EngineSettings
from .findings import Finding, failed, not_applicable, ok, warning
from .scene import Check, Scene

_ASK_SECONDS: Final = 8.0
_OTHERS: Final = frozenset({"haproxy", "kubernetes", "webhook"})


@dataclass(frozen=True, slots=True)
class GateFacts:
    """``state`` is None with a gate that could not be asked; ``trouble`` says why."""

    engine: str
    kind: str
    state: GateState | None = None
    trouble: str = ""
    is_unknown_to_gateway: bool = False


def _silent(*_: Any, **__: Any) -> None:
    """Where the agent would tell its operator: here the finding does."""


async def _ask(settings: AgentSettings, engine: EngineSettings) -> GateFacts:
    gateway = GatewayGate(settings.data_dir / "gateway.sock", call_seconds_max=_ASK_SECONDS)
    engine_id = str(read_json(settings.data_dir / "node.json").get(f"engine:{engine.name}", engine.name))
    try:
        gate = make_gate(settings, engine, gateway, _silent)
        async with asyncio.timeout(_ASK_SECONDS):
            seen = await gate.observe(engine_id)
    except GateRouteUnknown as error:
        return GateFacts(engine.name, engine.gate_kind, trouble=str(error), is_unknown_to_gateway=True)
    except TimeoutError:
        return GateFacts(engine.name, engine.gate_kind, trouble=f"no answer in {_ASK_SECONDS:g} s")
    except (AgentError, OSError) as error:  # ConfigError: what its file leaves to a pod to tell
        return GateFacts(engine.name, engine.gate_kind, trouble=str(error))
    return GateFacts(engine.name, engine.gate_kind, seen.state)


def judge_gate(facts: GateFacts) -> Finding:
    if facts.is_unknown_to_gateway:
        return not_applicable("the gateway behind it does not know the engine yet", facts.engine)
    if facts.state is None:
        way = f"see [engines.{facts.kind}] in docs/gates.md: without its gate the engine is not lent"
        return failed(f"its {facts.kind} gate cannot be asked: {facts.trouble}", way, facts.engine)
    if facts.state is GateState.UNKNOWN:
        seen = f"its {facts.kind} gate is neither open nor closed: some of it is, some of it is not"
        return warning(seen, "the agent makes it so again when it next closes or opens it", facts.engine)
    return ok(f"its {facts.kind} gate answers, and is {facts.state}", facts.engine)


def check_gates(scene: Scene) -> list[Finding]:
    settings = scene.known
    engines = [engine for engine in settings.engines if engine.gate_kind in _OTHERS]

    async def ask_all() -> list[GateFacts]:
        return await asyncio.gather(*(_ask(settings, engine) for engine in engines))

    found = [judge_gate(facts) for facts in (asyncio.run(ask_all()) if engines else [])]
    return found or [not_applicable("every gate is the gateway's, or there is none")]


CHECKS = (Check("gates", "traffic", "Gates of HAProxy, Kubernetes and webhooks answer.", check_gates),)
