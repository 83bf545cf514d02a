"""Gates, by kind; each is imported when it is first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        case "haproxy":
            from .haproxy import HaproxyGate
            from .haproxy_backed import BackedHaproxyGate

            assert engine.haproxy is not None
            front = HaproxyGate(engine.haproxy, engine.name)
            port = int(settings.gateway.listen.rpartition(":")[2])
            gate = BackedHaproxyGate(front, gateway, port) if engine.haproxy.gateway_backup else front
            traits = GateTraits("haproxy", "gate", may_open_by_itself=True, endpoint=engine.haproxy.endpoint)
            return KeptGate(gate, traits, engine.name, say)
        case "kubernetes":
            from .counting import Counter
            from .kubernetes import KubernetesGate

            assert engine.kubernetes is not None
            counter = Counter(engine.url, engine.kind, engine.kubernetes, engine.api_key_file)
            traits = GateTraits("kubernetes", counter.counted_by, True, engine.kubernetes.endpoint)
            return KeptGate(KubernetesGate(engine.kubernetes, counter), traits, engine.name, say)
        case "webhook":
            from .counting import Counter
            from .webhook import WebhookGate

            assert engine.webhook is not None
            section, others = engine.webhook, None
            if section.nobody_counts(engine.kind) is None:
                others = Counter(engine.url, engine.kind, section, engine.api_key_file)
            traits = GateTraits("webhook", "gate", may_open_by_itself=True, endpoint=section.endpoint)
            return KeptGate(WebhookGate(section, engine.name, others), traits, engine.name, say)
