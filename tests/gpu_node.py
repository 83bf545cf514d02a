"""A node whose devices are GPUs: the real agent over the fake NVML, engines and jobs over the fake CUDA driver.

Nothing of the product knows that they are fakes: NVML tells what processes hold through the driver.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lull.agents.processes import find_by_environ
from lull.agents.protocol.wire import AttemptSpec
from lull.agents.settings import MEMORY_SERVICE_FLAGS
from lull.vmm.cuda_driver import CudaDriver
from tests import kept_nodes
from tests.agent_node import MIB, AgentNode, EngineUnderTest
from tests.fake_cuda.library import GRANULE_BYTES, environment
from tests.fake_cuda.library import load as load_cuda
from tests.fake_nvml.library import FakeNvml, gpu_uuid
from tests.fake_nvml.library import load as load_nvml

GPU_BYTES = 16 * MIB


class GpuNode(AgentNode):
    """This process's environment says which GPUs there are (`gpu_machine`)."""

    def __init__(
        self, root: Path, engines: list[EngineUnderTest], devices: list[dict[str, Any]], **settings: Any
    ) -> None:
        self.nvml = FakeNvml(Path(os.environ["FAKE_CUDA_STATE"]))
        self._uuids = [str(device["uuid"]) for device in devices]
        super().__init__(root, engines, [GPU_BYTES] * len(devices), devices=devices, **settings)

    def _engine(self, engine: EngineUnderTest) -> dict[str, Any]:
        declared = super()._engine(engine)
        if declared["command"] is not None:
            command: list[str] = declared["command"]
            command[command.index("--device") + 1] = self._uuids[engine.devices[0]]
        return declared

    def gpu_job(self, argv: list[str], **fields: Any) -> AttemptSpec:
        """A job that finds the fake driver, as one on a real machine finds the driver."""
        env = {key: value for key, value in os.environ.items() if key.startswith("FAKE_CUDA_")}
        return self.job(argv, env={**env, "LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]}, **fields)


class GpuMachine:
    """GPUs, and one node on them whose engines live from test to test."""

    def __init__(self, root: Path, engines: list[EngineUnderTest], devices: list[dict[str, Any]]) -> None:
        self._root = root
        self._engines = engines
        self._devices = devices
        self._left: GpuNode | None = None

    @asynccontextmanager
    async def node(self, **settings: Any) -> AsyncIterator[GpuNode]:
        """A new agent; its engines are verified."""
        left, self._left = self._left, None
        port = None if left is None else left.gateway_port
        node = GpuNode(self._root, self._engines, self._devices, gateway_port=port, **settings)
        if left is not None:
            node._children, node._engine_ids = left._children, left._engine_ids
        kept = False
        try:
            await node.start()
            await node.ready()
            yield node
            kept = await kept_nodes.set_down(node)
        finally:
            node.nvml.end_all()
            if not kept:
                await node.end_everything()
        self._left = node

    def end(self) -> None:
        if self._left is not None:
            asyncio.run(self._left.end_everything())
            ids = (self._left._engine_ids or {}).values()
            assert not [pid for engine_id in ids for pid in find_by_environ("LULL_ENGINE", engine_id)]


@contextmanager
def gpu_machine(
    folder: Path, *engines: EngineUnderTest, uuids: list[str] | None = None, devices: int = 1, slices: int = 0
) -> Iterator[GpuMachine]:
    """For a fixture of module scope. ``uuids``: the [[devices]] of its node."""
    load_nvml()
    fake = load_cuda()
    state = folder / "gpus"
    state.mkdir()
    granules = GPU_BYTES // GRANULE_BYTES
    with pytest.MonkeyPatch.context() as patch:
        settings = environment(state, granules=granules, devices=devices, strict=True, slices=slices)
        for name, value in settings.items():
            patch.setenv(name, value)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        fake.reset()
        CudaDriver.devices()  # the machine is there from the first use of its driver on
        has_service = any(MEMORY_SERVICE_FLAGS in engine.extra for engine in engines)
        declared: list[dict[str, Any]] = [
            {"kind": "nvidia", "uuid": uuid, "memory_service": has_service} for uuid in uuids or [gpu_uuid(0)]
        ]
        machine = GpuMachine(folder, list(engines) or [EngineUnderTest()], declared)
        try:
            yield machine
        finally:
            machine.end()
            fake.reset()
