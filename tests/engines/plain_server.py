"""What the stand-ins of SGLang, LMDeploy, llama-server and ollama share, and an engine without any control route.

A stand-in is a process with an HTTP server of the standard library (it starts in a fifth of a second). Its "GPU memory"
is a pool on a real host-memory device, its answers are computed from the weights that lie there, so lost weights
give garbage and kept ones the same text. Every request is written to ``--calls``; the switches in ``--faults FILE``
(a JSON list, read at every request) make it misbehave as users saw its original do.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import signal
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lull.vmm.blocks import Allocation
from lull.vmm.errors import OutOfDeviceMemory
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from lull.vmm.pool import Pool
from lull.vmm.tags import RestoreMode

MIB = 1 << 20
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty", "knoll", "maple")


class Reply:
    """A status and a body, as a fixture file has them."""

    def __init__(self, status: int, body: bytes, content_type: str) -> None:
        self.status = status
        self.body = body
        self.content_type = content_type

    @classmethod
    def of_json(cls, status: int, value: Any) -> Reply:
        return cls(status, json.dumps(value).encode(), "application/json")


class Replies:
    """The replies of ``tests/engines/replies/NAME.json``, each with the public source of the fact."""

    def __init__(self, name: str) -> None:
        file = Path(__file__).with_name("replies") / f"{name}.json"
        self._replies: dict[str, dict[str, Any]] = json.loads(file.read_text())["replies"]

    def __getitem__(self, name: str) -> Reply:
        reply = self._replies[name]
        if "text" in reply:
            return Reply(reply["status"], reply["text"].encode(), "text/plain; charset=utf-8")
        return Reply.of_json(reply["status"], reply["json"])

    def value(self, name: str) -> Any:
        """A copy of the JSON body, for replies that have to be filled in."""
        return json.loads(json.dumps(self._replies[name]["json"]))


class Memory:
    """Weights and KV cache in a pool. ``modes``: what becomes of a tag's contents."""

    def __init__(self, device: Path, sizes: dict[str, int], modes: dict[str, RestoreMode], seed: str) -> None:
        opened = HostDevice.open(device)
        if opened.kind == "unified":  # a real engine of such a machine loads its weights again
            modes = dict.fromkeys(modes, RestoreMode.NONE)
        self.pool = Pool(HostDriver(opened), restore_modes=modes)
        self.modes = modes
        self._sizes = sizes
        self._seed = seed
        self._kept: dict[str, Allocation] = {}

    def load(self) -> None:
        """Takes all memory and fills the weights, as a start from disk does. Raises OutOfDeviceMemory."""
        for tag, nbytes in self._sizes.items():
            self._kept[tag] = self.pool.allocate(nbytes, tag)
        self.fill()

    def fill(self) -> None:
        """Writes the weights, as a reload from disk does."""
        weights = self._kept["weights"]
        block = hashlib.sha256(self._seed.encode()).digest() * (weights.nbytes // 32)
        ctypes.memmove(weights.address, block, len(block))

    def spoil(self) -> None:
        """One wrong byte in the weights."""
        weights = self._kept["weights"]
        ctypes.memset(weights.address, 0xFF, 1)

    def free(self) -> None:
        """All of it, as the end of a process does."""
        for tag in list(self._kept):
            self.pool.free(self._kept.pop(tag))

    @property
    def loaded(self) -> bool:
        return bool(self._kept)

    def digest(self) -> bytes:
        weights = self._kept["weights"]
        return hashlib.sha256(ctypes.string_at(weights.address, weights.nbytes)).digest()

    def text(self, prompt: str, tokens: int) -> str:
        """Greedy words: a function of every byte of the weights and of the prompt."""
        state, said = self.digest() + prompt.encode(), list[str]()
        for _ in range(tokens):
            state = hashlib.sha256(state).digest()
            said.append(WORDS[state[0] % len(WORDS)])
        return " ".join(said)


class StandIn:
    """One engine. Subclasses give ``routes``: (method, path) to a handler, and may guard all of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lock = threading.RLock()
        self.in_flight = 0
        self.hanging = threading.Event()  # never set: whoever waits for it hangs until the process ends
        self.memory = self.make_memory()
        if options.second_device is not None:
            from tests.engines.rank import RankedMemory

            self.memory = RankedMemory(self.memory, options.second_device, self.has_fault)
        self.routes: dict[tuple[str, str], Callable[[Request], Reply]] = {
            ("GET", "/health"): lambda request: Reply.of_json(200, {"status": "ok"}),
            ("POST", "/v1/completions"): self.complete,
        }

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

    def has_fault(self, name: str) -> bool:
        if self.options.faults is None:
            return False
        try:
            return name in json.loads(Path(self.options.faults).read_text())
        except FileNotFoundError:
            return False

    def guard(self, request: Request) -> Reply | None:
        """A reply instead of the route's, for example to a wrong key."""
        return None

    def complete(self, request: Request) -> Reply:
        body = request.json()
        with self.lock:
            self.in_flight += 1
        try:
            if self.has_fault("slow_answer"):
                self.hanging.wait(0.3)
            text = self.memory.text(str(body.get("prompt", "")), int(body.get("max_tokens", 16)))
        finally:
            with self.lock:
                self.in_flight -= 1
        if self.has_fault("garbage"):
            text = text[::-1]
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
        return Reply.of_json(200, {"object": "text_completion", "model": body.get("model"), "choices": [choice]})

    def write_call(self, request: Request) -> None:
        if self.options.calls is not None:
            body = request.body.decode()[:500]
            call = {"method": request.method, "path": request.path, "query": request.raw_query, "body": body}
            line = json.dumps(call)
            with self.lock, open(self.options.calls, "a") as file:
                file.write(line + "\n")

    def die(self, words: str) -> Reply:
        """As SIGQUIT to the whole tree does: no reply, no memory, no process."""
        print(words, flush=True)
        os._exit(1)


class Request:
    def __init__(self, method: str, target: str, headers: Any, body: bytes) -> None:
        split = urllib.parse.urlsplit(target)
        self.method = method
        self.path = split.path
        self.raw_query = split.query
        self.query = urllib.parse.parse_qs(split.query)
        self.headers = headers
        self.body = body

    def json(self) -> dict[str, Any]:
        try:
            value = json.loads(self.body or b"{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


def serve(stand_in: StandIn, port: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _any(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            request = Request(self.command, self.path, self.headers, self.rfile.read(length))
            stand_in.write_call(request)
            route = stand_in.routes.get((request.method, request.path))
            if route is None:
                reply = Reply.of_json(404, {"detail": "Not Found"})
            else:
                reply = stand_in.guard(request) or route(request)
            self.send_response(reply.status)
            self.send_header("content-type", reply.content_type)
            self.send_header("content-length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        do_GET = do_POST = _any

    if stand_in.options.dies_with is not None:
        threading.Thread(target=_watch_parent, args=(stand_in.options.dies_with,), daemon=True).start()
    ThreadingHTTPServer.daemon_threads = True
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.serve_forever(poll_interval=0.05)


def _watch_parent(pid: int) -> None:
    never = threading.Event()
    while os.getppid() == pid:
        never.wait(0.05)
    os._exit(1)


def options_of(*more: Callable[[argparse.ArgumentParser], Any]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--second-device", help="of a second rank, a process of its own")
    parser.add_argument("--model", default="small")
    parser.add_argument("--weights-mib", type=int, default=4)
    parser.add_argument("--kv-mib", type=int, default=2)
    parser.add_argument("--calls")
    parser.add_argument("--faults")
    parser.add_argument("--dies-with", type=int, help="pid of the parent; a killed server leaves no child behind")
    for add in more:
        add(parser)
    return parser.parse_args()


def made(make: Callable[[argparse.Namespace], StandIn], options: argparse.Namespace) -> StandIn:
    """An engine that finds no room for its memory ends, and says so."""
    try:
        return make(options)
    except OutOfDeviceMemory as error:
        raise SystemExit(f"out of device memory: {error}") from error


def run(make: Callable[[argparse.Namespace], StandIn], flags: Callable[[argparse.ArgumentParser], Any]) -> None:
    """The whole of a stand-in's process, with the flags of its own."""
    options = options_of(flags)
    serve(made(make, options), options.port)


def main() -> None:
    options = options_of()
    stand_in = made(StandIn, options)
    if stand_in.has_fault("ends_at_start"):
        raise SystemExit("CUDA error: out of memory")
    signal.signal(signal.SIGTERM, lambda *_: None if stand_in.has_fault("ignores_sigterm") else os._exit(0))
    serve(stand_in, options.port)


if __name__ == "__main__":
    main()
