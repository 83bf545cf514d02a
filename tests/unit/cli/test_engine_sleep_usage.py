"""Wrong usage of `lull engine park` and `resume` is said before anything is ordered."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent_node import free_port
from tests.cli_here import run_here


@pytest.mark.parametrize("verb", ["park", "resume"])
@pytest.mark.parametrize("words", [("--timeout", "1s"), ("--wait", "--timeout", "nonsense")], ids=["alone", "no time"])
def test_a_wrong_timeout_orders_nothing(tmp_path: Path, verb: str, words: tuple[str, ...]) -> None:
    token = tmp_path / "token"
    token.write_text("lull_" + "x" * 40)
    token.chmod(0o600)
    # Nobody answers there: with an order first, that would be what is said.
    environ = {
        "LULL_SERVER": f"http://127.0.0.1:{free_port()}",
        "LULL_TOKEN_FILE": str(token),
        "LULL_CONFIG": str(tmp_path / "none.toml"),
    }
    ended = run_here(("engine", verb, "alpha", *words), environ)
    assert (ended.returncode, "--timeout" in ended.stderr) == (2, True), ended.stderr
