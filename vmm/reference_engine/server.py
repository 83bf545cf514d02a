"""The HTTP face: OpenAI-style routes, and the control routes at the root as in TensorRT-LLM."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Final
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..control import CONTROL_PATHS, AsgiApp, Receive, Scope, Send, control_app
from ..errors import AdmissionClosed
from ..host_device import process_key
from .engine import Engine, build_engine
from .faults import FaultyRuntime
from .model import greedy, sampler
from .openai import AnswerFormat, Ask, BadRequest, error_body, parse_ask, sse
from .settings import EngineSettings
from .witness import CANARY_HEADER, Witness, WitnessLine
from .worker import EngineBusy, EngineStopping, Generation, Worker

BODY_BYTES_MAX: Final = 1 << 20
SHUTDOWN_SECONDS_MAX: Final = 5
KEEP_ALIVE_SECONDS: Final = 75  # longer than clients keep idle connections, so that it is they who close


class Routes:
    """The handlers, with what they share."""

    def __init__(self, settings: EngineSettings, engine: Engine, worker: Worker, witness: Witness) -> None:
        self._settings = settings
        self._engine = engine
        self._worker = worker
        self._witness = witness
        self._started_at = int(time.time())

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/health", self.health, methods=["GET"]),
                Route("/lull/addresses", self.addresses, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _http_error},
        )

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def models(self, request: Request) -> Response:
        model = {
            "id": self._settings.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "lull",
            "max_model_len": self._engine.model.context_tokens,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        """200 also while parked, as TensorRT-LLM does: a parked engine is alive and must not be restarted."""
        return Response()

    async def addresses(self, request: Request) -> Response:
        """Where each tag's memory is; for whoever proves that a park does not move it."""
        client = request.client
        if client is None or not ipaddress.ip_address(client.host).is_loopback:
            raise HTTPException(404)
        allocations = self._engine.allocations()
        tags = {a.tag: {"address": a.address, "bytes": a.nbytes, "device_bytes": a.reserved_bytes} for a in allocations}
        return JSONResponse({"pid": os.getpid(), "tags": tags})

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        request_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}"
        line = self._witness.arrived(
            request_id, canary=CANARY_HEADER in request.headers, state=self._engine.runtime.status().state
        )
        try:
            ask = self._parse(await _body(request), chat=chat)
            answer_format = AnswerFormat(request_id, self._settings.name, int(time.time()), ask)
            generation = self._admit(ask)
            if ask.stream:
                return _AnswerStream(self._stream(generation, answer_format, line), generation, line)
            return await self._whole(request, generation, answer_format, line)
        except AdmissionClosed as error:
            line.state = error.state
            line.ended(served=False)
            # 400 and no type: what TensorRT-LLM makes of it. Load balancers do not retry it.
            return JSONResponse({"error": {"message": str(error)}}, 400)
        except BadRequest as error:
            line.ended(served=False)
            return JSONResponse(error_body(str(error), field=error.field), error.status)
        except (EngineBusy, EngineStopping) as error:
            line.ended(served=False)
            return JSONResponse(error_body(str(error), kind="overloaded_error"), 503, {"retry-after": "1"})
        except BaseException:
            line.ended(served=False)
            raise

    def _parse(self, body: bytes, *, chat: bool) -> Ask:
        context_tokens = self._engine.model.context_tokens
        return parse_ask(
            body, chat=chat, model=self._settings.name, context_tokens=context_tokens, seed=self._settings.seed
        )

    def _admit(self, ask: Ask) -> Generation:
        """From here on a park waits for this request, also while it waits for its turn."""
        choose = sampler(ask.temperature, ask.seed) if ask.temperature else greedy
        if isinstance(self._engine.runtime, FaultyRuntime):
            choose = self._engine.runtime.spoil(choose)
        generation = Generation(ask.prompt, ask.tokens_max, choose, self._engine.runtime.step())
        self._worker.submit(generation)
        return generation

    async def _whole(
        self, request: Request, generation: Generation, answer_format: AnswerFormat, line: WitnessLine
    ) -> Response:
        watch = asyncio.create_task(_cancel_on_disconnect(request, generation))
        try:
            tokens = [token async for token in generation.tokens()]
        finally:
            watch.cancel()
        line.ended(served=len(tokens) == generation.tokens_max)
        return JSONResponse(answer_format.whole(tokens, self._cached(generation)))

    def _cached(self, generation: Generation) -> int | None:
        return None if self._engine.offload is None else generation.cached_tokens

    async def _stream(
        self, generation: Generation, answer_format: AnswerFormat, line: WitnessLine
    ) -> AsyncIterator[bytes]:
        count = 0
        try:
            if opening := answer_format.opening():
                yield opening
            async for token in generation.tokens():
                count += 1
                yield answer_format.chunk(token, last=count == generation.tokens_max)
            line.ended(served=True)
            yield answer_format.closing(count, self._cached(generation))
        except EngineStopping as error:
            yield sse(error_body(str(error), kind="overloaded_error"))  # the status line is long gone


async def _cancel_on_disconnect(request: Request, generation: Generation) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    generation.cancelled.set()


class _AnswerStream(StreamingResponse):
    """Starlette cancels it when the client goes away, perhaps before the first byte; the generation ends with it."""

    def __init__(self, content: AsyncIterator[bytes], generation: Generation, line: WitnessLine) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._generation = generation
        self._line = line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancelled.set()
            self._line.ended(served=False)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise BadRequest(f"the body is larger than {BODY_BYTES_MAX} bytes", status=413)
    return bytes(body)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for these"
    return JSONResponse(error_body(error.detail), error.status_code, error.headers)


def engine_app(settings: EngineSettings, engine: Engine, worker: Worker, witness: Witness) -> AsgiApp:
    """The control routes beside ours: an engine with an application of its own needs no more than this."""
    routes = Routes(settings, engine, worker, witness).app()
    control = control_app(engine.runtime, settings.control_key)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and str(scope["path"]).removesuffix("/") in CONTROL_PATHS:
            await control(scope, receive, send)
            if isinstance(engine.runtime, FaultyRuntime):
                engine.runtime.after_control_answer()
        else:
            await routes(scope, receive, send)

    return app


class _Server(uvicorn.Server):
    """uvicorn, but it says when it listens, and a signal ends what is being computed."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[], None], stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening
        self._stop = stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._stop()
        super().handle_exit(sig, frame)


def serve_engine(settings: EngineSettings) -> None:
    """Returns after SIGTERM or SIGINT. Raises OSError, ValueError or LullMemoryError if it cannot start."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave_loading)
    with ExitStack() as stack:
        listener = stack.enter_context(_bind(settings))  # first: a taken port is found out before memory is filled
        witness = Witness(settings.witness)
        stack.callback(witness.close)
        engine = build_engine(settings)
        if engine.offload is not None:
            stack.callback(engine.offload.close)
        worker = Worker(engine.model, token_delay_seconds=settings.token_delay_seconds)
        config = uvicorn.Config(
            engine_app(settings, engine, worker, witness),
            loop="uvloop",
            http="httptools",
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS_MAX,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stay)  # uvicorn raises the signal again when it has ended
        worker.start()
        stack.callback(worker.join)
        stack.callback(_stop, engine, worker)
        announce = partial(_announce, settings, engine, listener)
        _Server(config, announce, partial(_stop, engine, worker)).run(sockets=[listener])


def _stop(engine: Engine, worker: Worker) -> None:
    worker.stop()
    if isinstance(engine.runtime, FaultyRuntime):
        engine.runtime.stop()


def _leave_loading(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def _stay(_number: int, _frame: FrameType | None) -> None:
    return


def _bind(settings: EngineSettings) -> socket.socket:
    """Bound but not listening: until the engine is ready, connections are refused."""
    family, kind, protocol, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"--host {settings.host} --port {settings.port}: {error.strerror}") from error
    return listener


def _process_age_seconds() -> float:
    """Since the process was started, imports included."""
    key = process_key(os.getpid())
    assert key is not None, "we are alive"
    return time.clock_gettime(time.CLOCK_BOOTTIME) - key.start_ticks / os.sysconf("SC_CLK_TCK")


def _announce(settings: EngineSettings, engine: Engine, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    shown = {
        "listening": url,
        "model": settings.name,
        "pid": os.getpid(),
        "tags": engine.bytes_by_tag(),
        "weights": engine.weights_came,
        "weights_seconds": round(engine.weights_seconds, 4),
        "ready_seconds": round(_process_age_seconds(), 3),
    }
    if engine.offload is not None and engine.offload.host is not None:
        shown["kv_offload_host_bytes"] = engine.offload.host.held_bytes
    print(json.dumps(shown), flush=True)  # noqa: T201  the one line for whoever started us
