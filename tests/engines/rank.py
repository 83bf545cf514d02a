"""A second rank of a stand-in: a process with weights and KV cache on a device of its own, told what to do by rank 0.

Ranks that disagree are what users of tensor parallel engines met: sgl-project/sglang with THUDM/slime#579 and
radixark/miles#86 (ranks still unmap when the release is answered), NVIDIA/TensorRT-LLM#19016 (`Runtime-memory
state diverged across workers`), vllm-project/vllm#45520 (the core dies of a sleep) and #34600 (a wake comes back in
part). The faults, by name:

    rank_keeps            it frees nothing, and rank 0 does
    rank_late             it frees a while after everybody has answered
    rank_half_wake        its weights come back, its KV cache does not
    rank_dies_at_release  it is gone when it is told to release
    rank_dies_at_wake     it is gone when it is told to wake
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lull.vmm.tags import RestoreMode
from tests.engines.plain_server import Memory

LATE_SECONDS = 0.4
FOLLOW_FLAG = "--follow"


class RankDied(Exception):
    pass


class SecondRank:
    """Rank 0's end of it."""

    def __init__(self, device: str, sizes: dict[str, int], modes: dict[str, RestoreMode], seed: str) -> None:
        described = {"device": device, "sizes": sizes, "modes": modes, "seed": seed}
        self._child = subprocess.Popen(
            [sys.executable, __file__, FOLLOW_FLAG, json.dumps(described)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()
        self.tell("ready")

    def tell(self, verb: str, tags: Iterable[str] = ()) -> Any:
        """What it answers. Raises RankDied."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with self._lock:
            try:
                self._child.stdin.write(json.dumps([verb, list(tags)]) + "\n")
                self._child.stdin.flush()
                line = self._child.stdout.readline()
            except OSError:
                line = ""
        if not line:
            raise RankDied(f"rank 1 is gone: it was told to {verb}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def kill(self) -> None:
        self._child.kill()
        self._child.wait(10)


class RankedPool:
    """The pool of rank 0 and, through it, that of rank 1."""

    def __init__(self, pool: Any, rank: SecondRank, has_fault: Callable[[str], bool]) -> None:
        self._pool = pool
        self._rank = rank
        self._has_fault = has_fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def release(self, tags: Iterable[str]) -> None:
        chosen = list(tags)
        if self._has_fault("rank_dies_at_release"):
            self._rank.kill()
        self._pool.release(chosen)
        if self._has_fault("rank_keeps"):
            return
        if self._has_fault("rank_late"):
            threading.Timer(LATE_SECONDS, self._rank.tell, ("release", chosen)).start()
            return
        self._rank.tell("release", chosen)

    def resume(self, tags: Iterable[str]) -> None:
        chosen = list(tags)
        if self._has_fault("rank_dies_at_wake"):
            self._rank.kill()
        self._pool.resume(chosen)
        self._rank.tell("resume", [t for t in chosen if t != "kv_cache" or not self._has_fault("rank_half_wake")])

    def diverged(self) -> bool:
        """Whether the two ranks say different tags."""
        return sorted(self._pool.parked_tags()) != self._rank.tell("parked")


class RankedMemory(Memory):
    """Answers depend on the weights of both ranks."""

    def __init__(self, own: Memory, device: str, has_fault: Callable[[str], bool]) -> None:
        vars(self).update(vars(own))
        self.rank = SecondRank(device, own._sizes, own.modes, own._seed + " of rank 1")
        self.pool: Any = RankedPool(own.pool, self.rank, has_fault)

    def fill(self) -> None:
        super().fill()
        self.rank.tell("fill")

    def free(self) -> None:
        super().free()
        self.rank.kill()

    def digest(self) -> bytes:
        return hashlib.sha256(super().digest() + bytes.fromhex(self.rank.tell("digest"))).digest()


def follow(described: dict[str, Any]) -> None:
    """The process of rank 1: until rank 0 is gone."""
    modes = {tag: RestoreMode(mode) for tag, mode in described["modes"].items()}
    memory = Memory(Path(described["device"]), described["sizes"], modes, described["seed"])
    memory.load()
    verbs: dict[str, Callable[[list[str]], Any]] = {
        "ready": lambda tags: None,
        "release": memory.pool.release,
        "resume": memory.pool.resume,
        "parked": lambda tags: sorted(memory.pool.parked_tags()),
        "fill": lambda tags: memory.fill(),
        "digest": lambda tags: memory.digest().hex(),
    }
    for line in sys.stdin:
        verb, tags = json.loads(line)
        try:
            answer = {"value": verbs[verb](tags)}
        except Exception as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    follow(json.loads(sys.argv[2]))
