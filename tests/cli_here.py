"""The command line in this process: a user's command costs half a second of interpreter start, and tests give many."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from unittest import mock

from lull.cli.__main__ import main


def run_here(words: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """`lull WORDS` with just this environment, as if it had been a process: what it said, and its exit code."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    argv = ["lull", *words]
    with (
        mock.patch.dict(os.environ, environ, clear=True),
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    said = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(argv, code, *said)
