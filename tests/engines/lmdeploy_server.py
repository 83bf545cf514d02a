"""A stand-in of LMDeploy's api_server 0.16.0: sleep levels, its empty replies, its flag that is set before the work."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from lull.vmm.errors import OutOfDeviceMemory
from lull.vmm.tags import RestoreMode
from tests.engines.plain_server import MIB, Memory, Replies, Reply, Request, StandIn, run

TAGS = ("weights", "kv_cache")


class LmdeployServer(StandIn):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.replies = Replies("lmdeploy")
        self.asleep = False
        self.routes["GET", "/health"] = lambda request: self.replies["sleeping" if self.asleep else "healthy"]
        self.routes["GET", "/openapi.json"] = lambda request: self.replies["openapi"]
        self.routes["GET", "/is_sleeping"] = self.is_sleeping
        self.routes["POST", "/sleep"] = self.sleep
        self.routes["POST", "/wakeup"] = self.wake

    def make_memory(self) -> Memory:
        options = self.options
        memory = Memory(
            Path(options.device),
            {"weights": options.weights_mib * MIB, "kv_cache": options.kv_mib * MIB},
            {"weights": RestoreMode.CPU, "kv_cache": RestoreMode.NONE},
            options.model,
        )
        memory.load()
        return memory

    def guard(self, request: Request) -> Reply | None:
        wants_json = request.path in ("/sleep", "/wakeup")
        if wants_json and request.headers.get("content-type", "").lower() != "application/json":
            return self.replies["not_json"]
        return None

    def is_sleeping(self, request: Request) -> Reply:
        return self.replies["is_sleeping" if self.asleep else "is_awake"]

    def sleep(self, request: Request) -> Reply:
        level = request.query.get("level", ["1"])[0]
        if level not in ("1", "2"):
            return self.replies["bad_level"]
        self.asleep = True  # before the work: it stays true when that fails
        if self.has_fault("sleep_fails"):
            return Reply.of_json(500, {"detail": "Internal Server Error"})
        if self.options.backend == "pytorch" and not self.has_fault("frees_nothing"):
            if self.has_fault("late_free"):
                threading.Timer(0.4, self.memory.pool.release, (TAGS,)).start()
            else:
                self.memory.pool.release(TAGS)
        if self.has_fault("sleep_hangs"):
            self.hanging.wait()
        return self.replies["slept"]

    def wake(self, request: Request) -> Reply:
        tags = request.query.get("tags", list(TAGS))
        known = [tag for tag in tags if tag in TAGS]
        if not self.asleep or not known:
            return self.replies["slept"]
        if self.has_fault("half_wake"):
            known = [tag for tag in known if tag == "weights"]
        try:
            self.memory.pool.resume(known)
        except OutOfDeviceMemory:
            return Reply.of_json(500, {"detail": "Internal Server Error"})
        self.asleep = bool(self.memory.pool.parked_tags()) and not self.has_fault("half_wake")
        return self.replies["slept"]

    def complete(self, request: Request) -> Reply:
        if self.asleep:
            return self.replies["unavailable"]
        return super().complete(request)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=("pytorch", "turbomind"), default="pytorch")


if __name__ == "__main__":
    run(LmdeployServer, _flags)
