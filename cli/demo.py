"""`lull demo`: the main job on this machine, on real memory, without a GPU."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any, Final, NamedTuple, NoReturn

import httpx
import typer

from ..api.client import ClientError
from ..bench.box import Box, BoxError, EnginePlan, open_box
from ..bench.vllm_engine import NoVllm, find_vllm
from .demo_report import document_of, table_of
from .demo_story import Facts, Story, plan_engines, plan_vllm
from .demo_view import LiveTeller, PlainTeller
from .exits import ExitCode, fail, reported
from .output import described
from .quantities import format_size, parse_duration, parse_size

WEIGHTS_BYTES_MIN: Final = 16 << 20
WEIGHTS_BYTES_MAX: Final = 64 << 30


class _Usual(NamedTuple):
    weights: str
    timeout: str


class DemoEngine(StrEnum):
    REFERENCE = "reference"
    VLLM = "vllm"


_USUAL: Final = {DemoEngine.REFERENCE: _Usual("1GiB", "5m"), DemoEngine.VLLM: _Usual("64MiB", "20m")}


def demo(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything running and say where.")] = False,
    engine_weights: Annotated[
        str | None,
        typer.Option(
            "--engine-weights", metavar="SIZE", help="Weights of the engines. [default: 1GiB; vllm: 64MiB, of vLLM's]"
        ),
    ] = None,
    engine: Annotated[
        DemoEngine,
        typer.Option("--engine", help="What is lent: our reference engine, or a real vLLM on the CPU if one is there."),
    ] = DemoEngine.REFERENCE,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="DURATION", help="At most so long. [default: 5m; vllm: 20m]")
    ] = None,
) -> None:
    """Watch one whole loan on this machine, without a GPU.

    Two engines serve a steady stream of requests. A job needs more memory than is free: one engine is drained, parked
    and proved to have given its memory back, the job runs in it, the engine wakes at the same addresses with the same
    answers, and its traffic goes on. No request fails, and the other engine serves all the time.
    """
    with reported():
        usual = _USUAL[engine]
        weights_bytes, seconds = _weights(engine_weights or usual.weights), _seconds(timeout or usual.timeout)
        engines = _plan(engine, weights_bytes)
        try:
            with _terminated_like_interrupted():
                facts, trouble, kept = run_demo(engines, seconds, keep, as_json)
        except (BoxError, NoVllm) as error:  # before anything ran
            fail(f"demo: {error}")
        document = {**document_of(facts), "left_behind": trouble}
        if trouble:
            document["failures"] = [*document["failures"], *trouble]
            document["ok"] = False
        _print_result(document, as_json)
        if kept is not None:
            print(kept_words(kept), file=sys.stderr)
        if document["failures"]:
            raise typer.Exit(ExitCode.ERROR)


def _plan(engine: DemoEngine, weights_bytes: int) -> list[EnginePlan]:
    if engine is DemoEngine.REFERENCE:
        return plan_engines(weights_bytes)
    try:
        return plan_vllm(find_vllm(), weights_bytes)
    except NoVllm as error:
        fail(f"demo --engine vllm: {error}", ExitCode.USAGE)


def run_demo(
    engines: Sequence[EnginePlan], seconds: float, keep: bool, quiet: bool
) -> tuple[Facts, list[str], Box | None]:
    """The facts, what could not be cleared away, and the box if it was kept. Fails with a sentence."""
    trouble: list[str] = []
    live = sys.stderr.isatty() and not quiet
    view = LiveTeller({plan.name: plan.capacity_bytes for plan in engines}) if live else PlainTeller(quiet)

    def on_trouble(sentence: str) -> None:
        print(f"lull demo: {sentence}", file=sys.stderr)  # also when the demo itself has failed
        trouble.append(sentence)

    with view as teller, open_box(engines, on_trouble) as box:
        try:
            facts = Story(box, teller, seconds).run()
        except (BoxError, ClientError, httpx.HTTPError) as error:
            logs = "".join(f"\n--- end of {name}.log ---\n{box.log_tail(name)}" for name in ("server", "agent"))
            fail(f"demo: {error}{logs}")
        box.kept = keep
        if not keep:
            teller.say("clearing everything away")
    return facts, trouble, box if keep else None


def _print_result(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(document, indent=2), flush=True)
        return
    print()
    for line in described(table_of(document)):
        print(line)
    print()
    if document["ok"]:
        print("All as it should be: nothing was lost.")
    for sentence in document["failures"]:
        print(f"WRONG: {sentence}")


def kept_words(box: Box) -> str:
    """How to go on with a box that was kept, and how to end it."""
    return "\n".join(
        [
            f"API:      {box.server_url}/api/v1   (token: {box.token_file})",
            f"gateway:  {box.gateway_url}/v1",
            f"look:     export LULL_CONFIG={box.context_file}; lull engine list; lull ps",
            f"end it:   lull up --stop --data-dir {box.directory} && rm -r {box.directory}",
        ]
    )


@contextmanager
def _terminated_like_interrupted() -> Generator[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that everything is cleared away."""

    def unwind(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = [(number, signal.signal(number, unwind)) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _weights(text: str) -> int:
    try:
        size_bytes = parse_size(text)
    except ValueError as error:
        fail(f"--engine-weights: {error}", ExitCode.USAGE)
    if not WEIGHTS_BYTES_MIN <= size_bytes <= WEIGHTS_BYTES_MAX:
        least, most = format_size(WEIGHTS_BYTES_MIN), format_size(WEIGHTS_BYTES_MAX)
        fail(f"--engine-weights: {text} has to be between {least} and {most}", ExitCode.USAGE)
    return size_bytes


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        fail(f"--timeout: {error}", ExitCode.USAGE)
