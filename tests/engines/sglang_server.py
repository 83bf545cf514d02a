"""A stand-in of SGLang 0.5.23: its control routes, its states, and its habit of dying on a call in the wrong state.

The replies are in ``replies/sglang.json`` with their sources. A release twice, a release with a request in flight, a
resume of what is not released, a resume without room and a token generated on released memory end the whole process,
as the scheduler's exception ends the server (sgl-project/sglang#24123, #14092).
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from lull.vmm.errors import OutOfDeviceMemory
from lull.vmm.tags import RestoreMode
from tests.engines.plain_server import MIB, Memory, Replies, Reply, Request, StandIn, run
from tests.engines.rank import RankDied

TAGS = ("kv_cache", "weights", "cuda_graph")
ADMIN_ROUTES = frozenset(
    {
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/pause_generation",
        "/continue_generation",
        "/update_weights_from_disk",
        "/flush_cache",
    }
)


class SglangServer(StandIn):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.replies = Replies("sglang")
        self.released: set[str] = set()
        self.resumed = False
        self.running = threading.Event()  # cleared while generation is paused
        self.running.set()
        self.scheduler = threading.Lock()  # one control request after the other, as the scheduler takes them
        both = {
            "/release_memory_occupation": self.release,
            "/resume_memory_occupation": self.resume,
            "/flush_cache": self.flush,
        }
        for method in ("GET", "POST"):
            for path, handler in both.items():
                self.routes[method, path] = handler
        self.routes["GET", "/health"] = self.health
        self.routes["GET", "/ready"] = lambda request: self.replies["ready" if self.running.is_set() else "not_ready"]
        self.routes["GET", "/server_info"] = self.server_info
        self.routes["POST", "/pause_generation"] = self.pause
        self.routes["POST", "/continue_generation"] = self.proceed
        self.routes["POST", "/update_weights_from_disk"] = self.update_weights

    def make_memory(self) -> Memory:
        options = self.options
        keeps = RestoreMode.CPU if options.enable_weights_cpu_backup else RestoreMode.NONE
        memory = Memory(
            Path(options.device),
            {"weights": options.weights_mib * MIB, "kv_cache": options.kv_mib * MIB, "cuda_graph": MIB},
            {"weights": keeps, "kv_cache": RestoreMode.NONE, "cuda_graph": RestoreMode.CPU},
            options.model_path,
        )
        memory.load()
        return memory

    def guard(self, request: Request) -> Reply | None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.options.admin_api_key and request.path in ADMIN_ROUTES:
            return None if given == self.options.admin_api_key else self.replies["unauthorized"]
        wanted = self.options.api_key
        if wanted and request.path != "/health" and given != wanted:
            return self.replies["unauthorized"]
        return None

    # ---- control ----------------------------------------------------------------------------------------------

    def pause(self, request: Request) -> Reply:
        mode = request.json().get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return self.replies["body_missing"]
        self.running.clear()
        return self.replies["paused"]

    def proceed(self, request: Request) -> Reply:
        if self.has_fault("continue_refused"):
            return Reply.of_json(500, {"error": {"message": "Internal Server Error"}})
        self.running.set()
        return self.replies["continued"]

    def flush(self, request: Request) -> Reply:
        with self.lock:
            busy = self.in_flight > 0 or self.has_fault("never_idle")
        return self.replies["not_flushed" if busy else "flushed"]

    def release(self, request: Request) -> Reply:
        if not request.body:
            return self.replies["body_missing"]
        with self.scheduler:
            self._release(request.json().get("tags") or list(TAGS))
        if self.has_fault("release_answer_lost"):
            self.hanging.wait()
        return self.replies["released"]

    def _release(self, tags: list[str]) -> None:
        if self.has_fault("release_hangs"):
            self.hanging.wait()
        if not self.options.enable_memory_saver or self.has_fault("frees_nothing"):
            return
        known = self._known(tags)
        with self.lock:
            if self.in_flight:
                self.die("AssertionError: release_memory_occupation with an ongoing request")
            if set(known) & self.released:
                self.die("torch_memory_saver: cannot pause allocation that is not active")
            self.released |= set(known)
        if self.has_fault("dies_on_release"):
            self.die("scheduler died")
        if self.has_fault("late_free"):
            threading.Timer(0.4, self.memory.pool.release, (known,)).start()
        elif self.has_fault("half_free"):
            self.memory.pool.release([tag for tag in known if tag == "kv_cache"])
        else:
            try:
                self.memory.pool.release(known)
            except RankDied as error:
                self.die(str(error))

    def _known(self, tags: list[str]) -> list[str]:
        """An unknown tag is nobody's memory: 200 and nothing freed."""
        return [tag for tag in tags if tag in TAGS and (tag != "cuda_graph" or self.options.graphs)]

    def resume(self, request: Request) -> Reply:
        if not request.body:
            return self.replies["body_missing"]
        with self.scheduler:
            self._resume(request.json().get("tags") or list(TAGS))
        if self.has_fault("resume_answer_lost"):
            self.hanging.wait()
        return self.replies["released"]

    def _resume(self, tags: list[str]) -> None:
        if self.has_fault("resume_hangs"):
            self.hanging.wait()
        if not self.options.enable_memory_saver or self.has_fault("frees_nothing"):
            return
        known = self._known(tags)
        with self.lock:
            if not set(known) <= self.released:
                self.die("KeyError: resume of what is not released")
            try:
                self.memory.pool.resume(known)
            except OutOfDeviceMemory:
                self.die("torch_memory_saver: CUresult error result=2")
            except RankDied as error:
                self.die(str(error))
            self.released -= set(known)
            self.resumed = True

    def update_weights(self, request: Request) -> Reply:
        if "weights" in self.released:
            return self.die("CUDA error: an illegal memory access was encountered")
        if request.json().get("model_path") != self.options.model_path or self.has_fault("reload_fails"):
            return self.replies["weights_not_updated"]
        if not self.has_fault("reload_lies"):
            self.memory.fill()
        return self.replies["weights_updated"]

    # ---- the rest ---------------------------------------------------------------------------------------------

    def server_info(self, request: Request) -> Reply:
        with self.scheduler:  # the internal state comes from there
            options = self.options
        return Reply.of_json(
            200,
            {
                "model_path": options.model_path,
                "served_model_name": options.model,
                "enable_memory_saver": options.enable_memory_saver,
                "enable_weights_cpu_backup": options.enable_weights_cpu_backup,
                "tp_size": options.tp_size,
                "speculative_algorithm": options.speculative_algorithm or None,
                "enable_draft_weights_cpu_backup": False,
                "version": options.version,
                "internal_states": [{"last_gen_throughput": 0.0}],
            },
        )

    def health(self, request: Request) -> Reply:
        """Generates a token by default (SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION)."""
        if self.released and self.running.is_set():
            return self.die("CUDA error: an illegal memory access was encountered")
        if not self.running.wait(self.options.health_seconds):
            return self.replies["health_late"]
        return Reply.of_json(200, {})

    def complete(self, request: Request) -> Reply:
        self.running.wait(60)  # the tokenizer's gate
        if self.released:
            return self.die("CUDA error: an illegal memory access was encountered")
        if self.resumed and self.has_fault("hangs_after_resume"):
            self.hanging.wait()
        if self.resumed and self.has_fault("garbage_after_resume"):
            self.memory.spoil()
        return super().complete(request)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", default="0.5.23")
    parser.add_argument("--model-path", default="org/small")
    parser.add_argument("--enable-memory-saver", action="store_true")
    parser.add_argument("--enable-weights-cpu-backup", action="store_true")
    parser.add_argument("--graphs", action="store_true", help="as SGLANG_MEMORY_SAVER_CUDA_GRAPH=1")
    parser.add_argument("--speculative-algorithm", default="")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--admin-api-key", default="")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--health-seconds", type=float, default=20.0)


if __name__ == "__main__":
    run(SglangServer, _flags)
