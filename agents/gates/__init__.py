"""Gates, by kind; each is imported when it is first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..settings import AgentSettings, EngineSettings
    from .gateway import GatewayGate
    from .kept import KeptGate, Say


def make_gate(settings: AgentSettings, engine: EngineSettings, gateway: GatewayGate, say: Say) -> KeptGate:
    """The gate of one engine. ``gateway``: the node's, for the kinds that use it; ``say``: how an operator is told."""
    from .kept import GateTraits, KeptGate

    match engine.gate_kind:
        case "gateway":
            traits = GateTraits(
                "gateway", "gate", may_open_by_itself=False, endpoint=f"http://{settings.gateway.listen}"
            )
            return KeptGate(gateway, traits, engine.name, say)
        case "none":
            from .counting import Counter
            from .none import NoGate

            assert engine.none is not None
            counter = Counter(engine.url, engine.kind, engine.none, engine.api_key_file)
            traits = GateTraits("none", counter.counted_by, may_open_by_itself=False, endpoint=engine.none.endpoint)
            return KeptGate(NoGate(counter), traits, engine.name, say)
        case "haproxy" | "kubernetes" | "webhook":
            raise ConfigError(f"engine {engine.name}: gate_kind {engine.gate_kind!r} is not in this version")
