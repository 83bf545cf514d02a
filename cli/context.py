"""Which server a command talks to, and as whom: flags, then environment, then the context file, then defaults."""

from __future__ import annotations

import functools
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec

import platformdirs
import typer

from .documents import mapping_of, read_toml
from .exits import CliError, ExitCode, fail, reported
from .options import (
    GlobalOptions,
    NoHeadersOption,
    OutputFormat,
    OutputOption,
    ServerOption,
    TokenFileOption,
    global_options,
)

if TYPE_CHECKING:
    from ..api.client import Client
    from .output import Output

P = ParamSpec("P")

DEFAULT_SERVER: Final = "http://127.0.0.1:7070"
_CONTEXT_KEYS: Final = frozenset({"server", "token_file"})


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the file that holds the token for it."""

    server: str
    token_file: Path | None


def config_path(environ: Mapping[str, str] = os.environ) -> Path:
    named = environ.get("LULL_CONFIG")
    return Path(named).expanduser() if named else platformdirs.user_config_path("lull") / "config.toml"


def read_config(path: Path) -> dict[str, Any]:
    """The context file; an absent one is empty. CliError names file, line and key."""
    if not path.exists():
        return {}
    config = read_toml(path)
    for key in config.keys() - {"current_context", "contexts", "output"}:
        fail(f"{path}: unknown key {key!r}; known: current_context, contexts, output", ExitCode.USAGE)
    contexts = mapping_of(config.get("contexts", {}))
    if contexts is None:
        fail(f"{path}: contexts: has to be a table of contexts, [contexts.NAME]", ExitCode.USAGE)
    for name, context in contexts.items():
        _check_context(path, name, context)
    current = config.get("current_context")
    if current is not None and current not in contexts:
        fail(f"{path}: current_context: there is no [contexts.{current}]", ExitCode.USAGE)
    return config


def _check_context(path: Path, name: str, context: object) -> None:
    table = mapping_of(context)
    if table is None:
        fail(f"{path}: contexts.{name}: has to be a table", ExitCode.USAGE)
    for key, value in table.items():
        if key not in _CONTEXT_KEYS:
            fail(f"{path}: contexts.{name}: unknown key {key!r}; known: server, token_file", ExitCode.USAGE)
        if not isinstance(value, str):
            fail(f"{path}: contexts.{name}.{key}: has to be a string", ExitCode.USAGE)


def resolve(options: GlobalOptions, environ: Mapping[str, str] = os.environ) -> Target:
    """Where to connect. A flag for the server alone does not pick up another server's token from the file."""
    config = read_config(config_path(environ))
    context: dict[str, str] = config.get("contexts", {}).get(config.get("current_context"), {})
    server = options.server or environ.get("LULL_SERVER")
    token_file = options.token_file or environ.get("LULL_TOKEN_FILE")
    if token_file is None and (server is None or server.rstrip("/") == context.get("server", "").rstrip("/")):
        token_file = context.get("token_file")
    server = (server or context.get("server") or DEFAULT_SERVER).rstrip("/")
    if not server.startswith(("http://", "https://")):
        fail(f"--server: {server!r} has to start with http:// or https://", ExitCode.USAGE)
    return Target(server, Path(token_file).expanduser() if token_file else None)


def token_of(target: Target) -> str:
    from ..api.auth import TokenFileError, read_token

    if target.token_file is None:
        fail(
            f"no token for {target.server}: give --token-file FILE or set LULL_TOKEN_FILE"
            " (`lull up` writes both into the context file)",
            ExitCode.AUTHENTICATION,
        )
    try:
        return read_token(target.token_file)
    except TokenFileError as error:
        raise CliError(str(error), ExitCode.AUTHENTICATION) from None


def write_context(path: Path, name: str, target: Target) -> None:
    """Add or replace one context and make it the current one; the others stay. Written whole or not at all."""
    config = read_config(path)
    contexts: dict[str, dict[str, str]] = {**config.get("contexts", {})}
    contexts[name] = {"server": target.server}
    if target.token_file is not None:
        contexts[name]["token_file"] = str(target.token_file)
    lines = [f"current_context = {_quoted(name)}"]
    if "output" in config:
        lines.append(f"output = {_quoted(config['output'])}")
    for context_name, context in contexts.items():
        lines.append(f"\n[contexts.{_quoted(context_name)}]")
        lines += [f"{key} = {_quoted(value)}" for key, value in context.items()]
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".config", delete=False) as draft:
        draft.write("\n".join(lines) + "\n")
        draft.flush()
        os.fsync(draft.fileno())
    Path(draft.name).replace(path)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a JSON string is a TOML basic string


@dataclass(slots=True)
class Session:
    """What a client command works with. The connection is made at first use and closed at the end."""

    target: Target
    out: Output
    _client: Client | None = None

    @property
    def client(self) -> Client:
        if self._client is None:
            from ..api.client import Client

            self._client = Client(self.target.server, token_of(self.target))
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


@contextmanager
def open_session(options: GlobalOptions, environ: Mapping[str, str] = os.environ) -> Generator[Session]:
    from .output import Output

    session = Session(resolve(options, environ), Output(output_format(options, environ), options.no_headers))
    try:
        yield session
    finally:
        session.close()


def output_format(options: GlobalOptions, environ: Mapping[str, str]) -> OutputFormat:
    if options.output is not None:
        return options.output
    wanted = environ.get("LULL_OUTPUT") or read_config(config_path(environ)).get("output") or "table"
    try:
        return OutputFormat(wanted)
    except ValueError:
        fail(f"LULL_OUTPUT: {wanted!r} is none of {', '.join(OutputFormat)}", ExitCode.USAGE)


def client_command(function: Callable[Concatenate[Session, P], None]) -> Callable[..., None]:
    """Makes a command of a function whose first parameter is the session.

    The command takes the global options too, and whatever goes wrong in it ends in one line and an exit code.
    """
    own = inspect.signature(function, eval_str=True)
    extra = [
        inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for name, annotation, default in (
                ("server", ServerOption, None),
                ("token_file", TokenFileOption, None),
                ("output", OutputOption, None),
                ("no_headers", NoHeadersOption, False),
            )
        ),
    ]

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> None:
        context: typer.Context = kwargs.pop("context")
        given = GlobalOptions(
            kwargs.pop("server"), kwargs.pop("token_file"), kwargs.pop("output"), kwargs.pop("no_headers")
        )
        with reported(), open_session(global_options(context).under(given)) as session:
            function(session, *args, **kwargs)

    parameters = list(own.parameters.values())[1:]
    command.__signature__ = inspect.Signature([*parameters, *extra])  # type: ignore[attr-defined]
    return command
