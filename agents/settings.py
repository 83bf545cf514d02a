"""Settings of one agent: read once from TOML and flags, frozen, passed down."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

from pydantic import AfterValidator, Field, model_validator

from .checkpoint_settings import CudaCheckpointOptions, checkpoint_fault
from .device_settings import DeviceSettings, devices_fault, engine_devices_fault
from .engine_fields import misplaced
from .gates.sections import AgentGates, EngineGate
from .protocol.capabilities import loses_weights, refusal
from .protocol.config_file import FilePath
from .protocol.engine_kinds import MODES_ARE_FLAGS, EngineKind, known_capabilities, usual_restore_modes
from .protocol.policy import EnginePolicy
from .protocol.sizes import Bytes
from .protocol.written import Written, check_port, check_url

RESTORE_MODE_FLAGS: Final = "{restore_mode_flags}"  # in a command: becomes --restore-mode TAG=MODE for every tag
MEMORY_SERVICE_FLAGS: Final = "{memory_service_flags}"  # becomes --memory-service SOCKET of the engine's first device
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


# As engines and clients spell them: Qwen/Qwen3-8B, llama3.2:3b, ggml-org/gemma-3-4b-it-GGUF:Q4_K_M.
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}$")]
Argv = Annotated[list[str], Field(min_length=1, max_length=256)]


class GatewaySettings(Written):
    listen: Annotated[str, Field(pattern=r"^[^\s:]+:\d{1,5}$"), AfterValidator(check_port)] = "127.0.0.1:8070"


class VllmOptions(Written):
    """What a vLLM cannot be asked."""

    # How weights that level 2 lost are loaded again: the method of /collective_rpc. None: they may not be lost.
    reload: Literal["reload_weights"] | None = None
    allow_fragile: bool = False  # park versions before 0.17 too, which a request ends while they sleep
    # Adapters that are asked the canary as well as the model: a sleep may lose one silently.
    loras: Annotated[list[ModelName], Field(max_length=16)] = Field(default_factory=list[ModelName])


class EngineSettings(EngineGate):
    name: Name
    kind: EngineKind = "trtllm"
    models: Annotated[list[ModelName], Field(min_length=1, max_length=64)]
    url: Annotated[str, Field(pattern=r"^http://(127\.0\.0\.1|localhost|\[::1\]):\d{1,5}$"), AfterValidator(check_port)]
    device_indexes: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=64)]
    control_key_file: FilePath | None = None  # trtllm signs with it; sglang's admin_api_key
    api_key_file: FilePath | None = None  # sent as a bearer token where the engine wants one
    health_path: Annotated[str, Field(pattern=r"^/[!-~]*$", max_length=200)] = "/health"  # where a kind has no own
    # kind "command": the operator's own, each an argv.
    park_command: Argv | None = None
    resume_command: Argv | None = None
    observe_command: Argv | None = None
    observe_seconds_max: Seconds = 10.0
    vllm: VllmOptions = Field(default_factory=VllmOptions)
    cuda_checkpoint: CudaCheckpointOptions = Field(default_factory=CudaCheckpointOptions)
    # None: attached, somebody else runs it.
    command: Annotated[list[str], Field(min_length=1)] | None = None
    env: dict[str, str] = Field(default_factory=dict)
    health_seconds_max: Seconds = 300.0
    stop_seconds_max: Seconds = 30.0
    policy: EnginePolicy = Field(default_factory=EnginePolicy)
    policy_locked: bool = False
    # Park and wake it before it first serves, each way worth knowing, to learn what that frees and costs.
    trial_park: bool = False

    @model_validator(mode="before")
    @classmethod
    def _name_restore_modes(cls, value: Any) -> Any:
        """A policy without restore modes gets those that are usual for the kind."""
        if not isinstance(value, dict):
            return value
        fields = cast("dict[str, Any]", value)
        usual, policy = usual_restore_modes(str(fields.get("kind"))), fields.get("policy", {})
        if usual is None or not isinstance(policy, dict) or "restore_modes" in policy:
            return fields
        return {**fields, "policy": {**cast("dict[str, Any]", policy), "restore_modes": usual}}

    @model_validator(mode="after")
    def _check(self) -> EngineSettings:
        if self.kind == "process" and self.command is None:
            raise ValueError("command: an engine of kind 'process' is parked by ending it; say how it is started again")
        if fault := misplaced(self._given(), self.kind, is_supervised=self.command is not None):
            raise ValueError(fault)
        for field in ("park_command", "resume_command", "observe_command"):
            if self.kind == "command" and getattr(self, field) is None:
                raise ValueError(f"{field}: missing; it is needed for kind 'command'")
        if self.kind == "trtllm" and self.control_key_file is None:
            raise ValueError("control_key_file: this kind of engine signs its control calls; name the file of its key")
        if MODES_ARE_FLAGS[self.kind] and self.command is not None and RESTORE_MODE_FLAGS not in self.command:
            raise ValueError(
                f"command: put the word {RESTORE_MODE_FLAGS!r} where the engine takes its --restore-mode flags:"
                " without it the policy's restore_modes could not be obeyed"
            )
        self.check_gate(self.kind)
        if fault := checkpoint_fault(self.command, self.cuda_checkpoint):
            raise ValueError(fault)
        if len(set(self.device_indexes)) != len(self.device_indexes):
            raise ValueError("device_indexes: each device once")
        unable = refusal(known_capabilities(self.kind), self.policy)
        if unable is not None:
            raise ValueError(f"policy.restore_modes: {unable}")
        if fault := self.gate_refusal(self.policy):
            raise ValueError(f"policy.{fault}")
        if self.kind == "vllm" and self.vllm.reload is None and loses_weights(self.policy):
            raise ValueError(
                "policy.restore_modes: mode NONE loses the weights: say how they are loaded again, by"
                ' reload = "reload_weights" in [engines.vllm], or keep them: model_weights = "CPU"'
            )
        return self

    def _given(self) -> list[str]:
        """The fields that were written, those of its tables too."""
        given = sorted(self.model_fields_set)
        given += [f"vllm.{field}" for field in sorted(self.vllm.model_fields_set)]
        given += [f"cuda_checkpoint.{field}" for field in sorted(self.cuda_checkpoint.model_fields_set)]
        # An attached engine that is tried out waits for its turn as long as one that starts may take.
        return [field for field in given if not (field == "health_seconds_max" and self.trial_park)]


class AgentSettings(AgentGates):
    server_url: Annotated[str, Field(pattern=r"^https?://\S+$"), AfterValidator(check_url)]
    token_file: FilePath
    data_dir: FilePath
    node_name: Name = Field(default_factory=lambda: re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:63])
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    devices: Annotated[list[DeviceSettings], Field(max_length=64)] = Field(default_factory=list[DeviceSettings])
    engines: Annotated[list[EngineSettings], Field(max_length=256)] = Field(default_factory=list[EngineSettings])
    # Bytes of host memory that no backup may take.
    host_reserve_bytes: Bytes = 256 << 20
    # Where MemAvailable is read; another file where a container's /proc shows a larger machine than it may use.
    meminfo_file: FilePath = Path("/proc/meminfo")
    # Free disk below which no new loan is accepted; a restore needs none.
    journal_reserve_bytes: Bytes = 64 << 20
    # Added to what an engine takes back before it is resumed, on every device.
    wake_margin_bytes: Bytes = 0
    # Added to what a job needs before it is started, on every device.
    spawn_margin_bytes: Bytes = 0
    settle_poll_seconds: Seconds = 0.25
    # How long NVML may take for one look at all GPUs. Later their driver counts as hanging, and they are not lent.
    probe_seconds_max: Seconds = 5.0
    # How long a loan without a running attempt waits for the scheduler's word before it ends by itself.
    loan_idle_seconds_max: Seconds = 5.0
    # How long after SIGKILL processes of a job may take to be gone before the job counts as one that cannot be killed.
    unkillable_seconds_max: Seconds = 60.0
    engine_poll_seconds: Seconds = 2.0
    # Of one attempt's output: the first bytes and the last ones, half of each for either stream.
    log_head_bytes: Bytes = 64 << 20
    log_tail_bytes: Bytes = 192 << 20
    # Of all attempts: what is older goes, and beyond the size what ended first. Of a running one nothing.
    logs_keep_seconds: Annotated[float, Field(gt=0, le=10 * 365 * 24 * 3600)] = 14 * 24 * 3600.0
    logs_bytes_max: Bytes = 20 << 30

    @property
    def needs_gateway(self) -> bool:
        """With no engine yet it may as well be there."""
        return not self.engines or any(engine.needs_gateway for engine in self.engines)

    @model_validator(mode="after")
    def _check(self) -> AgentSettings:
        names: set[str] = set()
        for number, engine in enumerate(self.engines):
            if engine.name in names:
                raise ValueError(f"engines.{number}.name: every engine needs a name of its own")
            names.add(engine.name)
            if engine.needs_gateway and engine.url.rpartition(":")[2] == self.gateway.listen.rpartition(":")[2]:
                raise ValueError(
                    f"engines.{number}.url: {engine.url} is where the gateway itself listens; requests would go round"
                    " for ever: name the engine's own port"
                )
        if fault := devices_fault(self.devices):
            raise ValueError(fault)
        for number, engine in enumerate(self.engines):
            for index in engine.device_indexes:
                if index >= len(self.devices):
                    raise ValueError(
                        f"engines.{number}.device_indexes: there is no device {index};"
                        f" [[devices]] lists {len(self.devices)}"
                    )
            fault = engine_devices_fault(number, engine.device_indexes, engine.policy, engine.env, self.devices)
            if fault is not None:
                raise ValueError(fault)
            wants_service = MEMORY_SERVICE_FLAGS in (engine.command or ())
            if wants_service and not self.devices[engine.device_indexes[0]].memory_service:
                raise ValueError(
                    f"engines.{number}.command: {MEMORY_SERVICE_FLAGS!r} needs memory_service = true in the [[devices]]"
                    f" that the engine lives on (device {engine.device_indexes[0]})"
                )
        return self
