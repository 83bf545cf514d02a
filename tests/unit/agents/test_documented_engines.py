"""The set-ups in docs/engines.md load as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from lull.agents.protocol.config_file import load_toml
from lull.agents.protocol.engine_kinds import EngineKind
from lull.agents.settings import AgentSettings

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"
HEAD = """\
server_url = "http://127.0.0.1:7070"
token_file = "/run/token"
data_dir = "/var/lib/lull"

[[devices]]
path = "/var/lib/lull/device0"
capacity_bytes = "1GiB"

"""


def test_every_kind_has_a_set_up_that_loads(tmp_path: Path) -> None:
    blocks = [
        block for block in re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL) if "[[engines]]" in block
    ]
    kinds: set[str] = set()
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.toml"
        path.write_text(HEAD + block)
        kinds |= {engine.kind for engine in load_toml(path, AgentSettings).engines}
    assert kinds == set(get_args(EngineKind))
