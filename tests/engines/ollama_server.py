"""A stand-in of ollama: the model lives in a runner process, which any request starts and an empty one can end."""

from __future__ import annotations

import argparse
import json
import threading

from tests.engines.child_model import ChildModel
from tests.engines.plain_server import MIB, Memory, Replies, Reply, Request, StandIn, run


class OllamaServer(StandIn):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.replies = Replies("ollama")
        self.runner = ChildModel(options)
        self.listed = False
        self.routes["GET", "/"] = lambda request: Reply(200, b"Ollama is running", "text/plain")
        del self.routes["GET", "/health"]
        self.routes["GET", "/api/version"] = lambda request: self.replies["version"]
        self.routes["GET", "/api/ps"] = self.ps
        self.routes["POST", "/api/generate"] = self.generate

    def make_memory(self) -> Memory:
        return None  # type: ignore[return-value]  # the runner has it

    def ps(self, request: Request) -> Reply:
        if not self.listed:
            return Reply.of_json(200, {"models": []})
        value = self.replies.value("running")
        entry = value["models"][0]
        entry["name"] = entry["model"] = self.options.model
        entry["size"] = entry["size_vram"] = (self.options.weights_mib + self.options.kv_mib) * MIB
        return Reply.of_json(200, value)

    def generate(self, request: Request) -> Reply:
        body = request.json()
        if body.get("model") != self.options.model:
            value = self.replies.value("not_found")
            return Reply.of_json(404, {"error": value["error"].replace("MODEL", str(body.get("model")))})
        if not body.get("prompt") and body.get("keep_alive") == 0:
            return self._unload()
        with self.lock:
            if not self._load():
                return self.replies["load_failed"]
        if not body.get("prompt"):
            return Reply.of_json(200, {**self.replies.value("load"), "model": self.options.model})
        asked = {"prompt": body["prompt"], "max_tokens": body.get("options", {}).get("num_predict", 16)}
        reply = self.runner.ask("POST", "/v1/completions", json.dumps(asked).encode())
        text = json.loads(reply.body)["choices"][0]["text"]
        value = {**self.replies.value("load"), "model": self.options.model, "response": text, "done_reason": "length"}
        return Reply.of_json(200, value)

    def _load(self) -> bool:
        if self.has_fault("load_fails"):
            return False
        if not self.runner.alive:
            self.runner.start()
        self.listed = self.runner.wait_ready()
        return self.listed

    def _unload(self) -> Reply:
        with self.lock:
            if self.has_fault("late_free"):
                threading.Timer(0.4, self.runner.stop).start()
                self.listed = False
            elif not self.has_fault("stuck_stopping"):
                self.runner.stop()
                self.listed = False
        return Reply.of_json(200, {**self.replies.value("unload"), "model": self.options.model})

    def complete(self, request: Request) -> Reply:
        with self.lock:
            if not self._load():
                return self.replies["load_failed"]
        return self.runner.ask("POST", "/v1/completions", request.body)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load-at-start", action="store_true")


if __name__ == "__main__":
    run(OllamaServer, _flags)
