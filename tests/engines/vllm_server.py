"""A stand-in of vLLM's OpenAI server with sleep mode, version by version: 0.7.3, 0.8 to 0.33.

The replies are in ``replies/vllm.json`` with their sources. What differs between versions here: which routes there are,
whether replies have a body, how a bad value is refused, whether sleep pauses the scheduler (0.17), what a request to
a sleeping engine does (0.17, 0.33), when the scheduler goes on after a partial wake (0.24), whether a wake that failed
may be asked for again (0.25), and whether the prefix cache outlives the blocks that it names (0.17).

Level 2 loses the weights: answers are garbage until /collective_rpc reload_weights. /resume on a sleeping engine is
accepted and the next request ends it. ``--metal``: vllm-metal, which frees the KV cache only, and nothing in 0.3.0.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lull.vmm.errors import OutOfDeviceMemory
from lull.vmm.tags import RestoreMode
from tests.engines.plain_server import MIB, Memory, Replies, Reply, Request, StandIn, run
from tests.engines.rank import RankDied

TAGS = ("weights", "kv_cache")


class VllmServer(StandIn):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.replies = Replies("vllm")
        self.version = tuple(int(part) for part in options.version.split(".")[:2])
        self.asleep: set[str] = set()
        self.level = 0
        self.weights_lost = False
        self.paused_by_sleep = False
        self.paused_by_user = False
        self.unpaused_asleep = False
        self.dead = False
        self.aborting = False
        self.lora_lost = False
        self.woken = False
        self.hung = False
        self.idle = threading.Condition(self.lock)
        self.core = threading.Lock()  # utility calls, one after the other, as the engine core takes them
        self.cached_prompts: set[str] = set()
        self.stale_prompts: set[str] = set()
        self.routes["GET", "/health"] = lambda request: self.replies["core_dead" if self.dead else "healthy"]
        self.routes["GET", "/version"] = lambda request: Reply.of_json(200, {"version": options.version})
        self.routes["GET", "/openapi.json"] = self.openapi
        self.routes["GET", "/metrics"] = self.metrics
        if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
            self.routes |= self.dev_routes()

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

    def dev_routes(self) -> dict[tuple[str, str], Callable[[Request], Reply]]:
        version = self.version
        routes: dict[tuple[str, str], Callable[[Request], Reply]] = {
            ("POST", "/sleep"): self.sleep,
            ("POST", "/wake_up"): self.wake_up,
            ("POST", "/reset_prefix_cache"): self.reset_prefix_cache,
        }
        if version >= (0, 8):
            routes["GET", "/is_sleeping"] = self.is_sleeping
        if version >= (0, 11):
            routes["POST", "/collective_rpc"] = self.collective_rpc
        if (0, 14) <= version <= (0, 28) or version >= (0, 32):
            routes["POST", "/pause"] = self.pause
            routes["POST", "/resume"] = self.resume
        if version >= (0, 31):
            routes["POST", "/release_kv_cache_memory"] = self.release_kv_cache
        return routes

    def openapi(self, request: Request) -> Reply:
        """The handlers read their query themselves up to 0.31; from 0.32 the parameters are declared."""
        paths: dict[str, Any] = {}
        for method, path in self.routes:
            paths.setdefault(path, {})[method.lower()] = {"responses": {"200": {}}}
        if "/sleep" in paths and self.version >= (0, 32):
            names = ("level",) if self.options.no_mode else ("level", "mode")
            paths["/sleep"]["post"]["parameters"] = [{"name": name, "in": "query"} for name in names]
            paths["/wake_up"]["post"]["parameters"] = [{"name": "tags", "in": "query"}]
        return Reply.of_json(200, {"openapi": "3.1.0", "info": {"title": "FastAPI"}, "paths": paths})

    def metrics(self, request: Request) -> Reply:
        if self.options.metrics is not None:
            return Reply(200, self.options.metrics.encode(), "text/plain; version=0.0.4")
        text = (
            "# TYPE vllm:num_requests_running gauge\n"
            f'vllm:num_requests_running{{engine="0",model_name="{self.options.model}"}} {float(self.in_flight)}\n'
            f'vllm:num_requests_waiting{{engine="0",model_name="{self.options.model}"}} 0.0\n'
        )
        return Reply(200, text.encode(), "text/plain; version=0.0.4")

    def guard(self, request: Request) -> Reply | None:
        if self.options.api_key and request.path.startswith("/v1"):
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            return None if given == self.options.api_key else self.replies["unauthorized"]
        if self.dead and request.path != "/health":
            return self.replies["dead_error"]
        return None

    def said(self, name: str, since: tuple[int, int] = (0, 32)) -> Reply:
        return self.replies[name if self.version >= since else f"{name}_old"]

    # ---- sleep ------------------------------------------------------------------------------------------------

    def sleep(self, request: Request) -> Reply:
        level_text, mode = request.query.get("level", ["1"])[0], request.query.get("mode", ["abort"])[0]
        try:
            level = int(level_text)
        except ValueError:
            return self.said("bad_value")
        if self.version >= (0, 32) and (level not in (0, 1, 2) or mode not in ("abort", "wait", "keep")):
            return self.said("bad_value")
        if self.has_fault("sleep_hangs"):
            self.hang()
        with self.core:
            if self.version >= (0, 17) and not self.options.no_mode:
                self.pause_scheduler(mode)
                self.paused_by_sleep = True
            elif self.in_flight:
                self.die("CUDA error: an illegal memory access was encountered")
            try:
                failed = self.release(level)
            except RankDied:
                self.end_core()
                failed = self.replies["dead_error"]
        if failed is not None:
            return failed
        if self.has_fault("core_dies_on_sleep"):
            self.end_core()
        if self.version < (0, 32):
            return self.said("sleeping")
        return Reply.of_json(200, {**self.replies.value("sleeping"), "level": level})

    def hang(self) -> None:
        """This call for ever, and whatever asks the core after it."""
        self.hung = True
        self.hanging.wait()

    def release(self, level: int) -> Reply | None:
        if level == 0 or "weights" in self.asleep:
            return None  # the executor returns early and the front end answers what it was asked
        self.level = level
        self.asleep = set(TAGS)
        if self.version >= (0, 17):
            self.cached_prompts.clear()
        else:
            self.stale_prompts |= self.cached_prompts
        self.weights_lost = self.weights_lost or (level >= 2 and self.frees)
        if self.options.metal:
            if self.options.metal_sleep:
                self.memory.pool.release(["kv_cache"])
            return None
        if not self.frees or self.has_fault("frees_nothing"):
            return None
        if self.version < (0, 8) or self.has_fault("late_free"):
            threading.Timer(0.3, self.memory.pool.release, (TAGS,)).start()
            return None
        self.memory.pool.release(TAGS)
        if self.has_fault("sleep_500_freed"):
            return self.replies["internal_error"]
        return None

    @property
    def frees(self) -> bool:
        return bool(self.options.enable_sleep_mode or self.options.pool_worker)

    def pause_scheduler(self, mode: str) -> None:
        with self.idle:
            if mode == "abort":
                self.aborting = True
                self.idle.notify_all()
            if mode != "keep":
                self.idle.wait_for(lambda: self.in_flight == 0)
            self.aborting = False

    def wake_up(self, request: Request) -> Reply:
        if self.has_fault("wake_hangs"):
            self.hang()
        if self.has_fault("wake_kills"):
            threading.Timer(0.1, os._exit, (1,)).start()
            return self.replies["internal_error"]
        asked = request.query.get("tags", list(TAGS))
        with self.core:
            tags = [tag for tag in TAGS if tag in asked and tag in self.asleep]
            try:
                self.map_again(tags)
            except OutOfDeviceMemory:
                return self.replies["internal_error"]
            except RankDied:
                self.end_core()
                return self.replies["dead_error"]
            self.asleep -= set(tags)
            self.woken = True
            if self.asleep and self.options.data_parallel_size > 1 and (0, 17) <= self.version < (0, 24):
                self.die("CUDA error: an illegal memory access was encountered (dummy batch)")
            with self.idle:
                # A wake that finds nothing of its tags asleep changes nothing; the scheduler has a tag of its own.
                goes_on = bool(tags) or "scheduling" in asked or "tags" not in request.query
                if goes_on and (not self.asleep or self.version < (0, 24)):
                    self.paused_by_sleep = False
                    self.idle.notify_all()
        if self.has_fault("lora_dropped"):
            self.lora_lost = True
        if self.version < (0, 32):
            return self.said("awake")
        given = {"status": "sleeping" if self.asleep else "awake", "tags": request.query.get("tags")}
        return Reply.of_json(200, {**self.replies.value("awake"), **given})

    def map_again(self, tags: list[str]) -> None:
        """Tag by tag, nothing rolled back. A tag that is mapped already is mapped again, and leaks, before 0.25."""
        pool = self.memory.pool
        for tag in tags:
            if tag == "kv_cache" and self.has_fault("half_wake"):
                raise OutOfDeviceMemory(0, 0, 0)
            if tag in pool.parked_tags():
                pool.resume([tag])
                if tag == "weights" and self.weights_lost:
                    weights = pool.allocations("weights")[0]
                    ctypes.memset(weights.address, 0x5A, weights.nbytes)
            elif self.version < (0, 25) and self.frees and not self.options.metal:
                pool.allocate(getattr(self.options, "weights_mib" if tag == "weights" else "kv_mib") * MIB, "leaked")

    def is_sleeping(self, request: Request) -> Reply:
        if self.hung and (self.has_fault("sleep_hangs") or self.has_fault("wake_hangs")):
            self.hanging.wait()
        if self.has_fault("ranks_disagree"):
            return self.replies["ranks_disagree"]
        return Reply.of_json(200, {"is_sleeping": bool(self.asleep) or self.paused_by_sleep or self.paused_by_user})

    def release_kv_cache(self, request: Request) -> Reply:
        with self.core:
            if not self.frees or self.asleep or not (self.paused_by_sleep or self.paused_by_user):
                return self.replies["kv_not_released"]
            self.asleep = {"kv_cache"}
            self.stale_prompts |= self.cached_prompts  # nothing says that it forgets them: the worst is stood in for
            if not self.has_fault("frees_nothing"):
                self.memory.pool.release(["kv_cache"])
        return self.replies["kv_released"]

    # ---- the rest of control ----------------------------------------------------------------------------------

    def pause(self, request: Request) -> Reply:
        self.pause_scheduler(request.query.get("mode", ["abort"])[0])
        self.paused_by_user = True
        return self.replies["paused"]

    def resume(self, request: Request) -> Reply:
        with self.idle:
            self.unpaused_asleep = bool(self.asleep)
            self.paused_by_user = self.paused_by_sleep = False
            self.idle.notify_all()
        return self.replies["resumed"]

    def reset_prefix_cache(self, request: Request) -> Reply:
        if self.has_fault("cache_not_reset"):
            return Reply.of_json(200, {"success": False})
        self.cached_prompts.clear()
        self.stale_prompts.clear()
        return self.said("cache_reset")

    def collective_rpc(self, request: Request) -> Reply:
        if request.json().get("method") != "reload_weights" or self.has_fault("reload_fails"):
            return self.replies["internal_error"]
        if "weights" in self.asleep:
            return self.die("CUDA error: an illegal memory access was encountered")
        if not self.has_fault("reload_lies"):
            self.memory.fill()
        self.weights_lost = False
        return self.replies["rpc_done"]

    def end_core(self) -> None:
        """The core is a process of its own: its memory goes with it, the front end stays."""
        self.dead = True
        self.memory.free()

    # ---- inference --------------------------------------------------------------------------------------------

    def complete(self, request: Request) -> Reply:
        body = request.json()
        prompt, tokens = str(body.get("prompt", "")), int(body.get("max_tokens", 16))
        if self.has_fault("answer_hangs_after_wake") and self.woken:
            self.hanging.wait()
        with self.idle:
            if self.paused_by_user and self.version >= (0, 33):
                return self.replies["user_paused"]
            if self.asleep and (self.version < (0, 17) or self.unpaused_asleep or not self.paused_by_sleep):
                self.die("CUDA error: an illegal memory access was encountered")
            self.idle.wait_for(lambda: not (self.paused_by_sleep or self.paused_by_user))
            if self.asleep:
                self.die("CUDA error: an illegal memory access was encountered")
            self.in_flight += 1
        try:
            cut = self.run(prompt)
        finally:
            with self.idle:
                self.in_flight -= 1
                self.idle.notify_all()
        return self.answer(body, prompt, 0 if cut else tokens)

    def run(self, prompt: str) -> bool:
        """True if the request was aborted: it is answered 200 with what there is, as mode=abort does."""
        with self.idle:
            while prompt.startswith("long") and self.has_fault("long_answers") and not self.aborting:
                self.idle.wait(0.02)
            return self.aborting

    def answer(self, body: dict[str, Any], prompt: str, tokens: int) -> Reply:
        stale = prompt in self.stale_prompts
        self.cached_prompts.add(prompt)
        asked_of_lora = body.get("model") in self.options.lora and not self.lora_lost
        seen = prompt + (f" as {body['model']}" if asked_of_lora else "")
        words = self.memory.text(seen, tokens).split()
        if (self.has_fault("garbage") and self.woken) or stale:
            words = words[::-1]
        logprobs = None
        if body.get("logprobs") is not None:
            logprobs = {"tokens": words, "token_logprobs": [-0.25 * len(word) for word in words]}
        choice: dict[str, Any] = {"index": 0, "text": " ".join(words), "logprobs": logprobs, "finish_reason": "length"}
        if body.get("return_token_ids") and self.version >= (0, 11):
            choice["token_ids"] = [sum(word.encode()) for word in words]
        if not tokens:
            choice["finish_reason"] = "abort"
        return Reply.of_json(200, {"object": "text_completion", "model": body.get("model"), "choices": [choice]})


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", default="0.33.0")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--no-mode", action="store_true", help="sleep moves memory and stops nothing (vllm#53082)")
    parser.add_argument("--metrics", default=None, help="what /metrics says, in place of its gauges")
    parser.add_argument("--pool-worker", action="store_true", help="as --worker-cls with lull.vmm pools")
    parser.add_argument("--metal", action="store_true")
    parser.add_argument("--metal-sleep", action="store_true", help="a vllm-metal after 0.3.0")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--lora", action="append", default=[])
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--speculative-config", default="")
    parser.add_argument("--data-parallel-size", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--kv-offloading-backend", default="")


if __name__ == "__main__":
    run(VllmServer, _flags)
