"""What `lull up` fills into an agent's file, for a command that only reads that file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import platformdirs

from ..agents.doctor.scene import FilledIn
from .context import config_path, read_config
from .exits import CliError
from .up_files import AGENT_FLAGS, UpPaths, read_record

_PORT_DEFAULT = 7070


def filled_in(config: Path, environ: Mapping[str, str] = os.environ) -> FilledIn:
    """The values of the `lull up` that has started an agent with ``config``, else those of one that would.

    Looked for where `lull up` keeps its things unless told otherwise, and where the contexts have its tokens.
    """
    for paths in _boxes(environ):
        try:
            record = read_record(paths)
        except (CliError, OSError):
            continue
        words = [] if record is None else record.agent_argv
        given = dict(pairwise(words))
        if "--config" in given and Path(given["--config"]).absolute() == config.resolve():
            values = {key: given[flag] for key, flag in AGENT_FLAGS.items() if flag in given}
            return FilledIn(values, by=f"`lull up` in {paths.data_dir}")
    paths = UpPaths(platformdirs.user_data_path("lull"))
    would = {
        "server_url": f"http://127.0.0.1:{_PORT_DEFAULT}",
        "token_file": str(paths.token_file),
        "data_dir": str(paths.agent_dir),
    }
    missing = would.keys() - _keys_of(config)
    return FilledIn({key: would[key] for key in would if key in missing}, assumed=frozenset(missing))


def _boxes(environ: Mapping[str, str]) -> Iterator[UpPaths]:
    yield UpPaths(platformdirs.user_data_path("lull"))
    tokens = [environ.get("LULL_TOKEN_FILE")]
    try:
        contexts = read_config(config_path(environ)).get("contexts", {})
        tokens += [context.get("token_file") for context in contexts.values()]
    except (CliError, OSError):
        pass  # whoever uses a context is told; here it is one place less to look at
    for token in tokens:
        folder = Path(token).expanduser().absolute() if token else None
        if folder is not None and len(folder.parents) > 1:
            yield UpPaths(folder.parents[1])


def _keys_of(config: Path) -> set[str]:
    """All of them where the file cannot be read: nothing is to be filled in then."""
    try:
        return set(tomllib.loads(config.read_text()))
    except (OSError, ValueError):
        return set(AGENT_FLAGS)
