"""A node whose devices are GPUs: the real agent over the fake NVML, engines and jobs over the fake CUDA driver.

Nothing of the product knows that they are fakes: NVML tells what processes hold through the driver.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from lull.agents.processes import find_by_environ
from tests.agent_node import MIB, AgentNode, EngineUnderTest
from tests.fake_cuda.library import GRANULE_BYTES
from tests.fake_nvml.library import FakeNvml, gpu_uuid, load

GPU_BYTES = 16 * MIB
GPU_GRANULES = GPU_BYTES // GRANULE_BYTES


class GpuNode(AgentNode):
    """Call ``new_fake_cuda`` first: this process's environment says which GPUs there are."""

    def __init__(
        self, root: Path, engines: list[EngineUnderTest], devices: list[dict[str, Any]], **settings: Any
    ) -> None:
        load()
        self.nvml = FakeNvml(Path(os.environ["FAKE_CUDA_STATE"]))
        self._uuids = [str(device.get("uuid", gpu_uuid(0))) for device in devices]
        super().__init__(root, engines, [GPU_BYTES] * len(devices), devices=devices, **settings)
        self.may_be_kept = False

    def _engine(self, engine: EngineUnderTest) -> dict[str, Any]:
        declared = super()._engine(engine)
        if declared["command"] is not None:
            command: list[str] = declared["command"]
            command[command.index("--device") + 1] = self._uuids[engine.devices[0]]
        return declared

    def gpu_job(self, argv: list[str], **fields: Any) -> Any:
        """A job that finds the fake driver, as one on a real machine finds the driver."""
        env = {key: value for key, value in os.environ.items() if key.startswith("FAKE_CUDA_")}
        return self.job(argv, env={**env, "LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]}, **fields)


@asynccontextmanager
async def gpu_node(
    root: Path, *engines: EngineUnderTest, devices: list[dict[str, Any]] | None = None, **settings: Any
) -> AsyncIterator[GpuNode]:
    wanted = list(engines) or [EngineUnderTest()]
    node = GpuNode(root, wanted, devices or [{"kind": "nvidia", "uuid": gpu_uuid(0)}], **settings)
    try:
        await node.start()
        await node.ready()
        yield node
    finally:
        node.nvml.end_all()
        await node.end_everything()
        assert not [pid for it in (node._engine_ids or {}).values() for pid in find_by_environ("LULL_ENGINE", it)]
