"""A stand-in of `trtllm-serve --enable_sleep_mode` with two ranks: what the reference engine, which has one, cannot do.

Signed control as in NVIDIA/TensorRT-LLM#19016. A rank that is lost after the commit stops all ranks.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from lull.vmm.signing import ControlAuthError, RequestVerifier
from lull.vmm.tags import RestoreMode
from tests.engines.plain_server import MIB, Memory, Replies, Reply, Request, StandIn, run
from tests.engines.rank import RankDied, RankedPool

CONTROL = frozenset({"/release_memory", "/resume_memory", "/memory_status"})
OURS = {"model_weights": "weights", "kv_cache": "kv_cache"}


class TrtllmServer(StandIn):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.replies = Replies("trtllm")
        self.parked: list[str] = []
        self.verifier = RequestVerifier([os.environ["TRTLLM_RUNTIME_CONTROL_API_KEY"].encode()])
        self.routes["POST", "/release_memory"] = self.release
        self.routes["POST", "/resume_memory"] = self.resume
        self.routes["GET", "/memory_status"] = self.status

    def make_memory(self) -> Memory:
        options = self.options
        modes = dict(one.split("=") for one in options.restore_mode)
        memory = Memory(
            Path(options.device),
            {"weights": options.weights_mib * MIB, "kv_cache": options.kv_mib * MIB},
            {OURS[tag]: RestoreMode(mode) for tag, mode in modes.items()},
            options.model,
        )
        memory.load()
        return memory

    def guard(self, request: Request) -> Reply | None:
        if request.path not in CONTROL:
            return None
        headers = {name.lower(): value for name, value in request.headers.items()}
        try:
            self.verifier.verify(request.method, request.path, headers, request.body, now=time.time())
        except ControlAuthError as error:
            return Reply.of_json(401, {"detail": str(error)})
        return None

    def release(self, request: Request) -> Reply:
        self.parked = sorted(request.json().get("tags") or OURS)
        try:
            self.memory.pool.release([OURS[tag] for tag in self.parked])
        except RankDied as error:
            self.die(str(error))
        return self.replies["done"]

    def resume(self, request: Request) -> Reply:
        try:
            self.memory.pool.resume([OURS[tag] for tag in self.parked])
        except RankDied as error:
            self.die(str(error))
        self.parked = []
        return self.replies["done"]

    def status(self, request: Request) -> Reply:
        pool = self.memory.pool
        if isinstance(pool, RankedPool) and pool.diverged():
            return self.replies["diverged"]
        state = "parked" if self.parked else "running"
        return Reply.of_json(200, {"state": state, "parked_tags": self.parked})

    def complete(self, request: Request) -> Reply:
        if self.parked:
            return self.replies["admission_closed"]
        return super().complete(request)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--restore-mode", action="append", default=[])


if __name__ == "__main__":
    run(TrtllmServer, _flags)
