"""A stand-in of any CUDA program that serves: it knows nothing of parking, and holds its memory through the driver.

It runs on the fake libcuda (FAKE_CUDA_STATE). Answers are computed from the bytes on the device, so a request that
comes while the process is locked waits in the driver, as it would on a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from lull.vmm.errors import OutOfDeviceMemory
from tests.engines.plain_server import MIB, Memory, StandIn, run

OUT_OF_MEMORY = 2


class CudaMemory(Memory):
    """One piece of device memory for the weights and one for the KV cache, made with the bindings alone."""

    def __init__(self, sizes: dict[str, int], seed: str) -> None:
        self._sizes = sizes
        self._seed = seed
        self._cuda: Any = import_module("cuda.bindings.driver")
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", 0)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._call("cuCtxSetCurrent", self._context)
        self._stream = self._call("cuStreamCreate", 1)
        self._at: dict[str, tuple[int, int]] = {}

    def _call(self, name: str, *words: Any) -> Any:
        code, *values = getattr(self._cuda, name)(*words)
        if int(code) == OUT_OF_MEMORY:
            raise OutOfDeviceMemory(int(words[0]) if name == "cuMemCreate" else 0, 0, 0)
        assert int(code) == 0, (name, code)
        return values[0] if values else None

    def load(self) -> None:
        for tag, nbytes in self._sizes.items():
            self._at[tag] = (self._taken(nbytes), nbytes)
        self.fill()

    def _taken(self, nbytes: int) -> int:
        cuda = self._cuda
        self._call("cuCtxSetCurrent", self._context)
        wanted = cuda.CUmemAllocationProp()
        wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = 0
        handle = self._call("cuMemCreate", nbytes, wanted, 0)
        address = self._call("cuMemAddressReserve", nbytes, 0, 0, 0)
        self._call("cuMemMap", address, nbytes, 0, handle, 0)
        access = cuda.CUmemAccessDesc()
        access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = 0
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, nbytes, [access], 1)
        return int(address)

    def fill(self) -> None:
        address, nbytes = self._at["weights"]
        self._copy("cuMemcpyHtoDAsync", address, hashlib.sha256(self._seed.encode()).digest() * (nbytes // 32))

    def _copy(self, name: str, address: int, content: bytes | bytearray) -> None:
        self._call("cuCtxSetCurrent", self._context)
        host = (ctypes.c_char * len(content)).from_buffer(bytearray(content))
        words = (address, ctypes.addressof(host)) if name == "cuMemcpyHtoDAsync" else (ctypes.addressof(host), address)
        self._call(name, *words, len(content), self._stream)
        self._call("cuStreamSynchronize", self._stream)
        if name == "cuMemcpyDtoHAsync":
            content[:] = host.raw  # type: ignore[index]

    def digest(self) -> bytes:
        address, nbytes = self._at["weights"]
        content = bytearray(nbytes)
        self._copy("cuMemcpyDtoHAsync", address, content)
        return hashlib.sha256(content).digest()


class CudaServer(StandIn):
    def make_memory(self) -> Memory:
        options = self.options
        memory = CudaMemory({"weights": options.weights_mib * MIB, "kv_cache": options.kv_mib * MIB}, options.model)
        memory.load()
        self.ranks = [_rank(options) for _ in range(options.more_ranks)]
        for child in self.ranks:  # up only once every rank holds its memory
            assert child.stdout is not None
            child.stdout.readline()
        return memory


def _rank(options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Another process of the engine with memory of its own, as a tensor-parallel rank is."""
    argv = [sys.executable, str(Path(__file__)), "--rank", "--port", "0", "--device", options.device]
    argv += ["--weights-mib", "1", "--kv-mib", "1", "--dies-with", str(os.getpid())]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--more-ranks", type=int, default=0)
    parser.add_argument("--rank", action="store_true")


def _make(options: argparse.Namespace) -> StandIn:
    server = CudaServer(options)
    if options.rank:
        print("ready", flush=True)
        sys.stdin.read()
        raise SystemExit(0)
    return server


if __name__ == "__main__":
    run(_make, _flags)
