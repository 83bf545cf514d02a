"""The set-ups in docs/gates.md load as they stand, and its check of a signature accepts what the agent sends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from lull.agents.gates.sections import GateKind
from lull.agents.gates.webhook_call import signature
from lull.agents.protocol.config_file import load_toml
from lull.agents.settings import AgentSettings
from tests.doc_examples import example

PAGE = Path(__file__).parents[3] / "docs" / "gates.md"
HEAD = """\
server_url = "http://127.0.0.1:7070"
token_file = "/run/token"
data_dir = "/var/lib/lull"
"""
DEVICE = '[[devices]]\npath = "/var/lib/lull/device0"\ncapacity_bytes = "1GiB"\n'


def test_every_kind_has_a_set_up_that_loads(tmp_path: Path) -> None:
    kinds: set[str] = set()
    for number, block in enumerate(re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)):
        path = tmp_path / f"{number}.toml"
        path.write_text(HEAD + ("" if "[[devices]]" in block else DEVICE) + block)
        kinds |= {engine.gate_kind for engine in load_toml(path, AgentSettings).engines}
    assert kinds == set(get_args(GateKind)) - {"gateway"}  # which is what a file without a word has


def test_the_documented_check_takes_each_call_once_and_no_other() -> None:
    page: dict[str, Any] = {}
    exec(example("gates.md").replace('b"..."', r'b" a secret of its file\n"'), page)
    assert page["SECRET"] == b"a secret of its file"  # as the agent reads it
    body, at = b'{"verb": "close"}', 1760000000
    header = signature(page["SECRET"], at, "call-1", body)
    assert not page["is_signed"](header, body + b" ", at)
    assert not page["is_signed"](header, body, at + 301)
    assert not page["is_signed"](header.replace("call-1", "call-2"), body, at)
    assert not page["is_signed"](signature(b"another", at, "call-1", body), body, at)
    assert not page["is_signed"]("", body, at)
    assert page["is_signed"](header, body, at)
    assert not page["is_signed"](header, body, at)  # seen
    assert page["is_signed"](signature(page["SECRET"], at + 700, "call-3", body), body, at + 700)
    assert list(page["seen"]) == ["call-3"]
