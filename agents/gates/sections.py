"""What an operator says about a gate: the sections of the agent's file, one for each kind."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Final, Literal, cast

from pydantic import AfterValidator, Field, model_validator

from ..protocol.config_file import FilePath
from ..protocol.policy import EnginePolicy
from ..protocol.written import Written, check_port, check_url

GateKind = Literal["gateway", "haproxy", "kubernetes", "webhook", "none"]

# Gauges of requests that run and that wait, as each kind of engine calls them in its /metrics.
KNOWN_METRICS: Final[dict[str, tuple[str, ...]]] = {
    "vllm": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    "sglang": ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    "llama-server": ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
}

_LOOPBACK: Final = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\]):\d{1,5}")
_URL: Final = r"^(https://[^\s/@]+|http://(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?)(/[!-~]*)?$"

Seconds = Annotated[float, Field(gt=0, le=24 * 3600)]
MaybeSeconds = Annotated[float, Field(ge=0, le=24 * 3600)]
# Words of HAProxy's runtime API and of Kubernetes' paths: nothing in them can end a command or a path.
HaproxyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,127}$")]
KubernetesName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
QualifiedName = Annotated[str, Field(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
MetricName = Annotated[str, Field(pattern=r"^[A-Za-z_:][A-Za-z0-9_:]{0,199}$")]


def _check_socket(value: str) -> str:
    if value.startswith("/"):
        return value
    if _LOOPBACK.fullmatch(value):
        return check_port(value)
    raise ValueError(f"{value!r} is neither the absolute path of a socket nor a loopback HOST:PORT")


def _check_network(value: str) -> str:
    ipaddress.ip_network(value)
    return value


class GateSection(Written):
    # Where clients reach the engine, as it is shown to them.
    endpoint: Annotated[str, Field(pattern=r"^https?://\S+$", max_length=500)] | None = None


class CountingSection(GateSection):
    """For gates that cannot count what is in flight: who does."""

    metrics_path: Annotated[str, Field(pattern=r"^/[!-~]*$", max_length=200)] = "/metrics"
    # Gauges whose sum is what is in flight; None: those that the engine's kind is known to have; []: none.
    in_flight_metrics: Annotated[list[MetricName], Field(max_length=16)] | None = None
    # How long whatever was in flight may take to end, where nobody can count it.
    drain_grace_seconds: Seconds | None = None

    def metrics_of(self, engine_kind: str) -> tuple[str, ...]:
        if self.in_flight_metrics is not None:
            return tuple(self.in_flight_metrics)
        return KNOWN_METRICS.get(engine_kind, ())

    def nobody_counts(self, engine_kind: str) -> str | None:
        """What is missing, if neither the engine nor a time says when nothing is in flight."""
        if self.metrics_of(engine_kind) or self.drain_grace_seconds is not None:
            return None
        return (
            f"drain_grace_seconds: missing. This gate cannot count requests, and the gauges of an engine of kind"
            f" {engine_kind!r} are not known: say how long requests may take, or name its gauges as in_flight_metrics"
        )


class HaproxySection(GateSection):
    # Runtime sockets of every HAProxy that sends requests to the engine: paths, or loopback HOST:PORT.
    sockets: Annotated[list[Annotated[str, AfterValidator(_check_socket)]], Field(min_length=1, max_length=16)]
    backend: HaproxyName
    server: HaproxyName | None = None  # None: the engine's name
    # The port on HAProxy's server line; None: that of the engine's url. Another one is another server.
    server_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    # Our gateway is the backend's `backup` server and holds what arrives while the engine is away.
    gateway_backup: bool = True
    # How long a worker that was replaced by a reload may go on: `hard-stop-after` of its configuration. 0: no reloads.
    old_worker_seconds_max: MaybeSeconds = 30.0
    call_seconds_max: Seconds = 5.0


class KubernetesSection(CountingSection):
    # None: in a cluster, by the variables and files of the pod's service account.
    api_url: Annotated[str, Field(pattern=_URL, max_length=500), AfterValidator(check_url)] | None = None
    token_file: FilePath | None = None
    ca_file: FilePath | None = None
    client_certificate_file: FilePath | None = None
    client_key_file: FilePath | None = None
    namespace: KubernetesName | None = None
    # The engine's pod: by name, or the one that the selector finds, on a node if one is named.
    pod: KubernetesName | None = None
    pod_selector: Annotated[str, Field(pattern=r"^[!-~]+$", max_length=500)] | None = None
    node: KubernetesName | None = None
    # Services whose EndpointSlices must not list the pod as ready.
    services: Annotated[list[KubernetesName], Field(min_length=1, max_length=16)]
    # The pod's readiness gate, as its template names it.
    condition: QualifiedName | None = None
    # A label that the services select by. It has its value while the gate is open, and is gone while it is closed.
    label: QualifiedName | None = None
    label_value: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")] = "true"
    endpoint_seconds_max: Seconds = 60.0
    # What kube-proxy and clients' own caches take to follow the EndpointSlice. It cannot be observed.
    propagation_seconds: MaybeSeconds = 5.0
    call_seconds_max: Seconds = 10.0

    @model_validator(mode="after")
    def _check(self) -> KubernetesSection:
        if (self.pod is None) == (self.pod_selector is None):
            raise ValueError("pod: name the engine's pod, or give pod_selector; one of the two")
        if self.condition is None and self.label is None:
            raise ValueError('condition: name a readiness gate (condition = "lull.dev/serving"), a label, or both')
        if (self.client_certificate_file is None) != (self.client_key_file is None):
            raise ValueError("client_key_file: a client's certificate and its key go together")
        if self.api_url is not None and self.namespace is None:
            raise ValueError("namespace: missing; it is needed with api_url")
        return self


class WebhookSection(CountingSection):
    url: Annotated[str, Field(pattern=_URL, max_length=500), AfterValidator(check_url)]  # https, or http to loopback
    secret_file: FilePath
    ca_file: FilePath | None = None
    # Networks that the host may resolve to. Nothing else is ever connected to.
    allow: Annotated[list[Annotated[str, AfterValidator(_check_network)]], Field(min_length=1, max_length=64)]
    call_seconds_max: Annotated[float, Field(gt=0, le=30)] = 5.0


class NoneSection(CountingSection):
    """No gate: nothing is closed."""


SECTIONS: Final[dict[str, type[GateSection]]] = {
    "haproxy": HaproxySection,
    "kubernetes": KubernetesSection,
    "webhook": WebhookSection,
    "none": NoneSection,
}


class EngineGate(Written):
    """The gate of one engine, as its part of the file has it."""

    gate_kind: GateKind = "gateway"
    haproxy: HaproxySection | None = None
    kubernetes: KubernetesSection | None = None
    webhook: WebhookSection | None = None
    none: NoneSection | None = None

    def check_gate(self, engine_kind: str) -> None:
        """Raises ValueError, which names the field."""
        for kind in SECTIONS:
            section = getattr(self, kind)
            if section is not None and kind != self.gate_kind:
                raise ValueError(f"{kind}: only for gate_kind {kind!r}; this engine's is {self.gate_kind!r}")
            if section is None and kind == self.gate_kind:
                raise ValueError(f"{kind}: missing; gate_kind {kind!r} needs the section [engines.{kind}]")
            lacking = section.nobody_counts(engine_kind) if isinstance(section, CountingSection) else None
            if lacking is not None and kind != "webhook":  # a webhook may count itself
                raise ValueError(f"{kind}.{lacking}")

    def gate_refusal(self, policy: EnginePolicy) -> str | None:
        """Why this gate cannot do what ``policy`` asks for."""
        if policy.on_pressure and not self.needs_gateway:
            return "on_pressure: the gate of this engine does not see requests, so none could wake it"
        if policy.on_drain_deadline == "abort_requests" and self.gate_kind in ("kubernetes", "none"):
            return (
                f"on_drain_deadline: 'abort_requests': gate_kind {self.gate_kind!r} cannot abort requests;"
                ' set on_drain_deadline = "abort_loan"'
            )
        section = getattr(self, self.gate_kind, None)
        grace_seconds = section.drain_grace_seconds if isinstance(section, CountingSection) else None
        if grace_seconds is not None and grace_seconds > policy.drain_seconds_max:
            return (
                f"drain_seconds_max: {policy.drain_seconds_max:g} s are over before"
                f" {self.gate_kind}.drain_grace_seconds, which are {grace_seconds:g}, have passed: make it as long"
            )
        return None

    @property
    def needs_gateway(self) -> bool:
        """Requests of this engine go, or wait, in the node's own gateway."""
        return self.gate_kind == "gateway" or (self.haproxy is not None and self.haproxy.gateway_backup)


class AgentGates(Written):
    """What an agent's file says for the gates of all its engines: each engine's own word comes first."""

    gate_kind: GateKind = "gateway"
    haproxy: dict[str, Any] = Field(default_factory=dict[str, Any])
    kubernetes: dict[str, Any] = Field(default_factory=dict[str, Any])
    webhook: dict[str, Any] = Field(default_factory=dict[str, Any])
    none: dict[str, Any] = Field(default_factory=dict[str, Any])
    # How often a gate that may open by itself is looked at while it is closed.
    gate_poll_seconds: Annotated[float, Field(gt=0, le=60)] = 1.0

    @model_validator(mode="before")
    @classmethod
    def _share_gates(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = cast("dict[str, Any]", value)
        engines: Any = fields.get("engines")
        if not isinstance(engines, list):
            return fields
        return {**fields, "engines": [_with_gate(fields, engine) for engine in cast("list[object]", engines)]}

    @model_validator(mode="after")
    def _check_gates(self) -> AgentGates:
        for kind, section in SECTIONS.items():
            for key in getattr(self, kind):
                if key not in section.model_fields:
                    raise ValueError(f"{kind}.{key}: unknown key; remove it or correct its spelling")
        return self


def _with_gate(fields: dict[str, Any], engine: object) -> Any:
    """An engine of the file, with what the file says for all of them where it is silent itself."""
    if not isinstance(engine, dict):
        return engine
    own: dict[str, Any] = {**cast("dict[str, Any]", engine)}
    kind: Any = own.setdefault("gate_kind", fields.get("gate_kind", "gateway"))
    if kind not in SECTIONS:
        return own
    shared, section = fields.get(kind, {}), own.get(kind)
    if isinstance(shared, dict) and (section is None or isinstance(section, dict)):
        own[kind] = {**cast("dict[str, Any]", shared), **cast("dict[str, Any]", section or {})}
    return own
