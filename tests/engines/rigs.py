"""Every adapter with the stand-in of its engine, made as the agent makes them: for the contract that all keep."""

from __future__ import annotations

import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lull.agents.engine_process import EngineProcess
from lull.agents.engines import make_adapter
from lull.agents.engines.base import EngineAdapter
from lull.agents.engines.ledger import Ledger
from lull.agents.probe import HostMemoryProbe
from lull.agents.settings import RESTORE_MODE_FLAGS, EngineSettings
from lull.vmm.host_device import HostDevice
from tests.agent_node import free_port
from tests.engines.spawned import HERE, MIB, ROOT, stand_in_command
from tests.fake_cuda.account import bytes_by_pid
from tests.fake_cuda.library import environment
from tests.fake_nvml.library import gpu_uuid
from tests.waiting import wait_until_async

WEIGHTS_MIB: Final = 4
KV_MIB: Final = 2


@dataclass(frozen=True)
class Kind:
    """How one kind is set up. ``stays_mib``: what its park leaves; ``asks``: whether its state comes over HTTP.
    ``starts_parked``: the server starts without its model."""

    name: str
    kind: str
    script: str
    flags: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    stays_mib: int = 0
    signs: bool = False
    asks: bool = True
    starts_parked: bool = False
    on_cuda: bool = False  # its memory is on a device of the fake CUDA driver


_VLLM: Final = ("--enable-sleep-mode", "--version")
# {root} is the rig's folder.
_COMMANDS: Final = {
    f"{verb}_command": [sys.executable, "-I", "-S", str(HERE / "park_command.py"), verb, "{root}/faults.json"]
    for verb in ("park", "resume", "observe")
}
KINDS: Final = (
    Kind("trtllm", "trtllm", "", signs=True),
    Kind("vllm 0.33", "vllm", "vllm_server.py", (*_VLLM, "0.33.0")),
    Kind(
        *("vllm 0.32, level 2", "vllm", "vllm_server.py", (*_VLLM, "0.32.0")),
        {
            "vllm": {"reload": "reload_weights"},
            "policy": {"restore_modes": {"model_weights": "NONE", "kv_cache": "NONE"}},
        },
    ),
    Kind(
        *("vllm 0.31, KV cache only", "vllm", "vllm_server.py", (*_VLLM, "0.31.0")),
        {"policy": {"restore_modes": {"kv_cache": "NONE"}}},
        stays_mib=WEIGHTS_MIB,
    ),
    Kind("vllm 0.22", "vllm", "vllm_server.py", (*_VLLM, "0.22.1")),
    Kind("vllm 0.14", "vllm", "vllm_server.py", (*_VLLM, "0.14.1"), {"vllm": {"allow_fragile": True}}),
    Kind("vllm-metal", "vllm-metal", "vllm_server.py", ("--metal", "--metal-sleep"), stays_mib=WEIGHTS_MIB),
    Kind("sglang", "sglang", "sglang_server.py", ("--enable-memory-saver", "--enable-weights-cpu-backup"), {}, 2),
    Kind("lmdeploy", "lmdeploy", "lmdeploy_server.py", ("--backend", "pytorch")),
    Kind("llama-server", "llama-server", "llama_server.py", starts_parked=True),
    Kind("ollama", "ollama", "ollama_server.py", starts_parked=True),
    Kind("cuda-checkpoint", "cuda-checkpoint", "cuda_server.py", asks=False, on_cuda=True),
    Kind("process", "process", "plain_server.py", asks=False),
    Kind("command", "command", "lmdeploy_server.py", settings=_COMMANDS, asks=False),
)


class Rig:
    """One engine and its settings. It is the `EngineOutside` of its adapters."""

    def __init__(self, kind: Kind, root: Path) -> None:
        self.kind = kind
        self.root = root
        self.device = HostDevice.create(root / "device", capacity_bytes=16 * MIB)
        self.cuda = root / "cuda"
        self.cuda.mkdir(exist_ok=True)
        self.key_file = root / "key"
        self.key_file.write_text("0123456789abcdef0123456789abcdef")
        self.key_file.chmod(0o600)
        self.port = free_port()
        self.settings = self.settings_at(self.port)
        # Its own mark: an engine's process is ended by it, also what another test run at the same time has started.
        mark = f"contract-{kind.name}-{uuid.uuid4().hex[:8]}"
        self.process = EngineProcess(
            root / "engine", mark, self.settings, cuda_visible=gpu_uuid(0) if kind.on_cuda else ""
        )
        (root / "faults.json").write_text("[]")

    def settings_at(self, port: int) -> EngineSettings:
        kind = self.kind
        fields: dict[str, Any] = {
            "name": "small",
            "kind": kind.kind,
            "models": ["small"],
            "url": f"http://127.0.0.1:{port}",
            "device_indexes": [0],
            "env": {"PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1", **self.cuda_environment()},
            "stop_seconds_max": 5,
            **{key: self._with_root(value) for key, value in kind.settings.items()},
        }
        if kind.signs:
            fields["control_key_file"] = self.key_file
            command = [str(Path(sys.executable).with_name("lull")), "engine", "serve", "--name", "small"]
            command += ["--port", str(port), "--device", str(self.device.path), "--weights", f"{WEIGHTS_MIB}MiB"]
            command += ["--kv-cache", f"{KV_MIB}MiB", "--control-key-file", str(self.key_file), RESTORE_MODE_FLAGS]
        else:
            command = stand_in_command(kind.script, self.root, self.device.path, port, *kind.flags)
        return EngineSettings.model_validate({**fields, "command": command})

    def cuda_environment(self) -> dict[str, str]:
        """A device of 16 MiB for those that live on one. The agent has to have it too."""
        return environment(self.cuda, granules=256) if self.kind.on_cuda else {}

    def _with_root(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [str(word).replace("{root}", str(self.root)) for word in value]

    @property
    def incarnation(self) -> str | None:
        known = self.process.process if self.process.alive else None
        return None if known is None else f"{known.boot_id}:{known.pid}:{known.start_ticks}"

    def pids(self) -> set[int]:
        return self.process.pids()

    async def held_bytes(self) -> dict[str, int]:
        if self.kind.on_cuda:
            held = bytes_by_pid(self.cuda)
            return {"cuda": sum(held.get(pid, 0) for pid in self.pids())}
        facts = HostMemoryProbe({self.device.uuid: self.device.capacity_bytes}).look()
        return {self.device.uuid: facts[self.device.uuid].bytes_of(self.process.pids())}

    async def held_mib(self) -> float:
        return sum((await self.held_bytes()).values()) / MIB

    def adapter(self, settings: EngineSettings | None = None) -> EngineAdapter:
        """A new one every time, as after a restart of the agent."""
        ledger = Ledger(self.root / "ledger.json", lambda: self.incarnation)
        return make_adapter(settings or self.settings, ledger, self)

    async def start(self) -> None:
        self.process.start(self.settings.policy)

        async def healthy() -> bool:
            assert self.process.alive, self.process.log_path.read_text()[-2000:]
            return await self.adapter().healthy()

        await wait_until_async(healthy, 60, f"{self.kind.name} healthy")

    def calls(self) -> int:
        """Requests that reached a stand-in."""
        path = self.root / "calls"
        return len(path.read_text().splitlines()) if path.exists() else 0

    async def stop(self) -> None:
        await self.process.stop(5)
