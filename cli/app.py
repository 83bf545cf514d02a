"""The command tree, as one table. A command's module is imported when the command runs, never for `--help`.

Only names that every installation has may be imported here: `lull --help` has to be quick and has to work with the
`cli` extra alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Final

import typer
import typer.core
import typer.main

from .options import OutputOption, ServerOption, TokenFileOption, remember_global_options


@dataclass(frozen=True, slots=True)
class Leaf:
    """One command: `module` (beside this file) and `function` do it; `extra` is what has to be installed."""

    module: str
    function: str
    help: str
    extra: str = "cli"
    # Everything after the first bare word belongs to the user's own command.
    trailing_argv: bool = False


@dataclass(frozen=True, slots=True)
class Branch:
    help: str
    children: Mapping[str, Leaf | Branch]


_SUBMIT: Final = Leaf("job_submit", "submit", "Submit a job: lull submit --hbm 40GiB -- CMD ARGS.", trailing_argv=True)
_LIST: Final = Leaf("job", "list_jobs", "List jobs.")
_SHOW: Final = Leaf("job", "show", "Show one job, its attempts and why it waits.")
_LOGS: Final = Leaf("job_logs", "logs", "Print a job's output; -f follows it.")
_CANCEL: Final = Leaf("job", "cancel", "Cancel jobs.")
_WAIT: Final = Leaf("job", "wait", "Wait for a job; the exit code is the job's own.")

ENGINE: Final = Branch(
    "Resident inference engines and their policies.",
    {
        "list": Leaf("engine", "list_engines", "List engines."),
        "show": Leaf("engine", "show", "Show one engine."),
        "restart": Leaf("engine", "restart", "Restart a supervised engine."),
        "park": Leaf("engine_sleep", "park", "Park an engine without a job; the next request wakes it."),
        "resume": Leaf("engine_sleep", "resume", "Wake an engine that is parked without a job."),
        "policy": Branch(
            "When and how an engine may be lent.",
            {
                "get": Leaf("engine_policy", "get_policy", "Print an engine's policy."),
                "set": Leaf("engine_policy", "set_policy", "Change fields of an engine's policy."),
            },
        ),
        "plan": Leaf("engine_plan", "plan", "Show what a loan would release of an engine."),
        "serve": Leaf("engine_serve", "serve", "Run the reference engine.", extra="torch"),
    },
)

TREE: Final = Branch(
    "Lends the GPUs of resident inference engines to jobs, and gives them back.",
    {
        "submit": _SUBMIT,
        "ps": _LIST,
        "show": _SHOW,
        "logs": _LOGS,
        "cancel": _CANCEL,
        "wait": _WAIT,
        "job": Branch(
            "Jobs: submit, watch, hold, cancel, run again.",
            {
                "submit": _SUBMIT,
                "list": _LIST,
                "show": _SHOW,
                "logs": _LOGS,
                "cancel": _CANCEL,
                "wait": _WAIT,
                "explain": Leaf("job", "explain", "Say why a job waits."),
                "hold": Leaf("job", "hold", "Keep queued jobs from being started."),
                "release": Leaf("job", "release", "Let held jobs be started."),
                "retry": Leaf("job", "retry", "Submit anew what jobs asked for that ended without success."),
                "resolve": Leaf("job", "resolve", "Decide what became of a job of which nobody can say it."),
            },
        ),
        "engine": ENGINE,
        "node": Branch(
            "Machines with an agent.",
            {
                "list": Leaf("node", "list_nodes", "List nodes."),
                "show": Leaf("node", "show", "Show one node and its devices."),
            },
        ),
        "loan": Branch(
            "Loans of devices: from closing traffic to opening it again.",
            {
                "list": Leaf("loan", "list_loans", "List loans."),
                "show": Leaf("loan", "show", "Show one loan, step by step."),
                "recall": Leaf("loan", "recall", "End a loan early; its jobs are queued again."),
                "give-up": Leaf("loan", "give_up", "Close a faulted loan as it is; its gates stay closed."),
            },
        ),
        "usage": Leaf("usage", "usage", "Who held each device, interval by interval."),
        "events": Leaf("events", "events", "Print events; -f follows them."),
        "up": Leaf("up", "up", "Run server and agent on this machine.", extra="all"),
        "demo": Leaf("demo", "demo", "Watch one whole loan on this machine, without a GPU.", extra="all"),
        "bench": Branch(
            "Benchmarks that print JSON.",
            {
                "loan": Leaf("bench", "bench_loan", "How much of a loan is Lull's own time.", extra="all"),
                "gateway": Leaf("bench_gateway", "bench_gateway", "The gateway beside other proxies.", extra="all"),
                "memory": Leaf("bench_memory", "bench_memory", "Park and wake beside plain copies of the same bytes."),
                "restart": Leaf(
                    "bench_restart", "bench_restart", "How soon a killed engine is ready again.", extra="torch"
                ),
            },
        ),
        "server": Leaf("server", "server", "Run the server: API and scheduler.", extra="server"),
        "agent": Leaf("agent", "agent", "Run the agent of this node.", extra="agent"),
        "memory-service": Leaf(
            "memory_service", "memory_service", "Own pools of device memory that outlive their engines."
        ),
        "gateway": Leaf("gateway", "gateway", "Run the traffic gateway of this node.", extra="agent"),
        "doctor": Leaf("doctor", "doctor", "Look at this node and say what is wrong with it.", extra="agent"),
    },
)


class LazyGroup(typer.core.TyperGroup):
    """A group whose children are light stand-ins until one of them is really called."""

    branch: Branch

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.branch.children)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        node = self.branch.children.get(cmd_name)
        if node is None:
            return None
        if isinstance(node, Branch):
            return build_group(node, cmd_name)
        return _stand_in(node, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        node = self.branch.children.get(name or "")
        if isinstance(node, Leaf):
            command = load(node, name or "")
        return name, command, rest


def _stand_in(leaf: Leaf, name: str) -> Any:
    def nothing() -> None:
        """Never called: resolve_command puts the real command in its place."""

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, help=leaf.help)(nothing)
    return typer.main.get_command(app)


@contextmanager
def _missing_extra_said(leaf: Leaf, name: str) -> Generator[None]:
    """A command imports at its head or in its body: wherever something is missing, one line says what to install."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] == "lull":
            raise
        print(
            f"lull {name}: needs the {leaf.extra!r} extra (no module {missing.name!r})."
            f"  Install it with:  pip install 'gpu-lull[{leaf.extra}]'",
            file=sys.stderr,
        )
        raise SystemExit(1) from None


def load(leaf: Leaf, name: str) -> Any:
    """The real command; a missing extra ends in one line that says what to install."""
    with _missing_extra_said(leaf, name):
        function: Callable[..., None] = getattr(import_module(f".{leaf.module}", __package__), leaf.function)

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> None:
        with _missing_extra_said(leaf, name):
            function(*args, **kwargs)

    settings: dict[str, Any] = {"allow_interspersed_args": False} if leaf.trailing_argv else {}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, context_settings=settings)(command)
    return typer.main.get_command(app)


def build_group(branch: Branch, name: str | None = None) -> Any:
    app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False, rich_markup_mode=None)

    @app.callback(help=branch.help)
    def group() -> None:
        """Only holds its children."""

    command: Any = typer.main.get_command(app)
    command.branch = branch
    command.name = name
    return command


def product_version() -> str:
    try:
        return version("gpu-lull")
    except PackageNotFoundError:
        return "unknown"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lull {product_version()}")
        raise typer.Exit


def build_root() -> Any:
    app = typer.Typer(cls=LazyGroup, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.callback(help=TREE.help)
    def root(
        context: typer.Context,
        server: ServerOption = None,
        token_file: TokenFileOption = None,
        output: OutputOption = None,
        no_headers: Annotated[bool, typer.Option("--no-headers", help="Tables without a head line.")] = False,
        show_version: Annotated[
            bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
        ] = False,
    ) -> None:
        remember_global_options(context, server, token_file, output, no_headers)

    command: Any = typer.main.get_command(app)
    command.branch = TREE
    return command


def run() -> None:
    """Parse, run, exit. A closed pipe (`lull ps | head`) is no error."""
    try:
        build_root()(prog_name="lull")
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(141) from None
