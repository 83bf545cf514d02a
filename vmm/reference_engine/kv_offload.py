"""Blocks of the KV cache beside the device: a tier in host memory, and one on disk behind it.

A block is what PREFILL_TOKENS tokens of a prompt left in the KV cache; its name is all that it depends on: the weights
and the prompt up to its end. A park empties the host tier, for nothing says that what it holds will be asked again, and
keeps its memory, which is taken once at the start and stays held. The disk tier keeps its blocks over a park, and over
the process, and serves them after the wake.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from .. import host_memory
from ..errors import OutOfHostMemory

_DIGEST_BYTES: Final = 32
_FILE_NAME: Final = re.compile(r"([0-9a-f]{64})\.kv")
_log = logging.getLogger(__name__)


class HostTier:
    """A fixed number of blocks in memory that is held from the start to the end."""

    def __init__(self, nbytes: int, block_bytes: int) -> None:
        """Raises OutOfHostMemory, and ValueError where not one block fits."""
        count = nbytes // block_bytes
        if count < 1:
            raise ValueError(
                f"--kv-offload-host is {nbytes} bytes and one block takes {block_bytes}; give more or none"
            )
        self.held_bytes = count * block_bytes
        if self.held_bytes > (available_bytes := host_memory.available_bytes()):
            raise OutOfHostMemory(self.held_bytes, available_bytes, "--kv-offload-host")
        self._address = host_memory.map_anonymous(self.held_bytes)
        ctypes.memset(self._address, 0, self.held_bytes)  # held from now on, and not when it is first needed
        self._block_bytes = block_bytes
        self._free = list(range(count))
        self._slots: OrderedDict[str, int] = OrderedDict()  # the one used last is at the end

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, name: str) -> memoryview | None:
        slot = self._slots.get(name)
        if slot is None:
            return None
        self._slots.move_to_end(name)
        return self._view(slot)

    def put(self, name: str, block: bytes | memoryview) -> None:
        """In place of the block that has not been used for longest, where there is no other room."""
        if name in self._slots:
            return
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        self._view(slot)[:] = block
        self._slots[name] = slot

    def empty(self) -> None:
        self._free.extend(self._slots.values())
        self._slots.clear()

    def close(self) -> None:
        self._slots.clear()
        self._free.clear()
        if self._address:
            host_memory.unmap_pages(self._address, self.held_bytes)
            self._address = 0

    def _view(self, slot: int) -> memoryview:
        address = self._address + slot * self._block_bytes
        return memoryview((ctypes.c_char * self._block_bytes).from_address(address)).cast("B")


class DiskTier:
    """A file for each block: its digest, then its bytes. What cannot be read right is no block, and is removed."""

    def __init__(self, directory: Path, bytes_max: int, block_bytes: int) -> None:
        """Raises OSError for a directory that cannot be made or listed, ValueError where not one block fits."""
        self._file_bytes = _DIGEST_BYTES + block_bytes
        self._count_max = bytes_max // self._file_bytes
        if self._count_max < 1:
            raise ValueError(
                f"--kv-offload-dir-size is {bytes_max} bytes and one block takes {self._file_bytes}; give more"
            )
        self._directory = directory
        self._refused = False
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._names = self._found()
        self._shrink()

    def __len__(self) -> int:
        return len(self._names)

    def _found(self) -> OrderedDict[str, None]:
        """The oldest first. Drafts of a process that died are removed."""
        found: list[tuple[float, str]] = []
        for entry in os.scandir(self._directory):
            match = _FILE_NAME.fullmatch(entry.name)
            if match is not None:
                found.append((entry.stat().st_mtime, match[1]))
            elif entry.name.endswith(".draft"):
                Path(entry.path).unlink(missing_ok=True)
        return OrderedDict((name, None) for _, name in sorted(found))

    def get(self, name: str) -> bytes | None:
        if name not in self._names:
            return None
        try:
            content = self._path(name).read_bytes()
        except OSError as error:
            _log.warning("block %s of the KV disk tier cannot be read and is forgotten: %s", name, error)
            content = b""
        block = content[_DIGEST_BYTES:]
        if len(content) != self._file_bytes or hashlib.sha256(block).digest() != content[:_DIGEST_BYTES]:
            self._remove(name)
            return None
        self._names.move_to_end(name)
        return block

    def put(self, name: str, block: bytes) -> None:
        """A full disk costs the block and nothing else."""
        if name in self._names:
            return
        draft = self._path(name).with_suffix(".draft")
        try:
            draft.write_bytes(hashlib.sha256(block).digest() + block)
            draft.replace(self._path(name))
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            if not self._refused:
                self._refused = True
                _log.warning("the KV disk tier %s cannot be written and takes nothing: %s", self._directory, error)
            return
        self._refused = False
        self._names[name] = None
        self._shrink()

    def _shrink(self) -> None:
        while len(self._names) > self._count_max:
            self._remove(next(iter(self._names)))

    def _remove(self, name: str) -> None:
        self._names.pop(name, None)
        with suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.kv"


class KvOffload:
    """Both tiers. For the thread that computes; `empty_host` also for one that parks while nothing computes."""

    def __init__(self, weights_name: str, host: HostTier | None, disk: DiskTier | None) -> None:
        """``weights_name``: all that the weights depend on."""
        self.host = host
        self.disk = disk
        self._seed = hashlib.sha256(weights_name.encode()).digest()

    def load(self, prompt: Sequence[int]) -> bytes | memoryview | None:
        """The last block of ``prompt``, where a tier has it. Valid until the next call."""
        name = self._name(prompt)
        if self.host is not None and (block := self.host.get(name)) is not None:
            return block
        found = None if self.disk is None else self.disk.get(name)
        if found is not None and self.host is not None:
            self.host.put(name, found)
        return found

    def save(self, prompt: Sequence[int], block: bytes) -> None:
        name = self._name(prompt)
        if self.host is not None:
            self.host.put(name, block)
        if self.disk is not None:
            self.disk.put(name, block)

    def empty_host(self) -> None:
        if self.host is not None:
            self.host.empty()

    def close(self) -> None:
        if self.host is not None:
            self.host.close()

    def _name(self, prompt: Sequence[int]) -> str:
        return hashlib.sha256(self._seed + array("I", prompt).tobytes()).hexdigest()
