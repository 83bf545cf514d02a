"""`lull engine policy set` against a real server."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.cli_here import run_here
from tests.wire_node import WireNode


@pytest.mark.parametrize(
    ("change", "restarts"),
    [
        ("restore_modes.kv_cache=CPU", True),
        ("settle_samples=7", False),
    ],
)
async def test_it_says_when_an_engine_will_be_restarted(
    http: httpx.AsyncClient, live_url: str, token: str, tmp_path: Path, change: str, restarts: bool
) -> None:
    node = WireNode(http)
    node.engines = (node.engine("alpha"),)
    await node.register()
    token_file = tmp_path / "token"
    token_file.write_text(token)
    token_file.chmod(0o600)
    environ = {"PATH": os.environ["PATH"], "LULL_CONFIG": str(tmp_path / "none.toml"), "LULL_SERVER": live_url}

    def run() -> subprocess.CompletedProcess[str]:
        words = ("engine", "policy", "set", "alpha", change)
        return run_here(words, {**environ, "LULL_TOKEN_FILE": str(token_file)})

    ended = await asyncio.to_thread(run)
    assert ended.returncode == 0, ended.stderr
    assert "policy version" in ended.stdout
    assert ("restart" in ended.stderr) == restarts, ended.stderr
