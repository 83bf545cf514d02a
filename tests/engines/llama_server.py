"""A stand-in of llama-server in router mode: one model, in a child process that a load starts and an unload ends.

Load answers as soon as the child is spawned, unload as soon as it is told; a request to an unloaded model loads it,
unless --no-models-autoload.
"""

from __future__ import annotations

import argparse
import threading
import time

from tests.engines.child_model import ChildModel
from tests.engines.plain_server import Memory, Replies, Reply, Request, StandIn, run


class LlamaServer(StandIn):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.replies = Replies("llama_server")
        self.child = ChildModel(options)
        self.status = "unloaded"
        self.failed = False
        self.routes["GET", "/health"] = lambda request: self.replies["health"]
        self.routes["GET", "/models"] = self.models
        self.routes["POST", "/models/load"] = self.load
        self.routes["POST", "/models/unload"] = self.unload
        if options.load_at_start:
            self._load()

    def make_memory(self) -> Memory:
        return None  # type: ignore[return-value]  # the child has it

    def models(self, request: Request) -> Reply:
        value = self.replies.value("models")
        entry = value["data"][0]
        entry["id"] = entry["path"] = self.options.model
        if self.status == "loaded" and not self.child.alive:
            self.status, self.failed = "unloaded", True
        if self.status == "loading":
            entry["status"] = self.replies.value("status_loading")
        elif self.failed:
            entry["status"] = {**self.replies.value("status_failed"), "exit_code": self.child.exit_code or 1}
        elif self.status == "unloaded":
            entry["status"] = self.replies.value("status_unloaded")
        if self.has_fault("says_unloaded"):
            entry["status"] = self.replies.value("status_unloaded")
        if self.has_fault("no_router"):  # started with -m
            del entry["status"]
        return Reply.of_json(200, value)

    def load(self, request: Request) -> Reply:
        if request.json().get("model") != self.options.model:
            return self.replies["not_found"]
        with self.lock:
            if self.status != "unloaded":
                return self.replies["already_running"]
            self._load()
        return self.replies["success"]

    def _load(self) -> None:
        self.status, self.failed = "loading", False
        self.child.start()
        threading.Thread(target=self._finish_load, daemon=True).start()

    def _finish_load(self) -> None:
        if self.has_fault("load_fails"):
            self.child.stop()
        ready = self.child.wait_ready()
        with self.lock:
            self.status, self.failed = ("loaded", False) if ready else ("unloaded", True)

    def unload(self, request: Request) -> Reply:
        if request.json().get("model") != self.options.model:
            return self.replies["not_found"]
        with self.lock:
            if self.status == "unloaded":
                return self.replies["not_running"]
            if self.has_fault("unload_lies"):
                return self.replies["success"]
            threading.Thread(target=self._finish_unload, daemon=True).start()
        return self.replies["success"]

    def _finish_unload(self) -> None:
        if self.has_fault("slow_child"):
            self.hanging.wait(0.4)
        self.child.stop()
        with self.lock:
            self.status = "unloaded"

    def complete(self, request: Request) -> Reply:
        with self.lock:
            if self.status == "unloaded":
                if self.options.no_models_autoload:
                    return self.replies["not_loaded"]
                self._load()
        deadline = time.monotonic() + 30
        while self.status == "loading" and time.monotonic() < deadline:
            self.hanging.wait(0.02)
        return self.child.ask("POST", "/v1/completions", request.body)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-models-autoload", action="store_true")
    parser.add_argument("--load-at-start", action="store_true")


if __name__ == "__main__":
    run(LlamaServer, _flags)
