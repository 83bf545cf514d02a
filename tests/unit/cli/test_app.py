"""The command tree: complete, quick, and helpful when something is not installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from lull.cli.app import TREE, Branch, Leaf, load

HEAVY = ("torch", "sqlalchemy", "fastapi", "aiohttp", "httpx", "yaml", "lull.api", "lull.agents", "lull.scheduler")


def leaves(branch: Branch, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Leaf]]:
    for name, node in branch.children.items():
        if isinstance(node, Branch):
            yield from leaves(node, (*path, name))
        else:
            yield " ".join((*path, name)), node


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", [name for name, _ in leaves(TREE)])
def test_every_command_can_be_loaded_and_has_help(name: str) -> None:
    leaf = dict(leaves(TREE))[name]
    command = load(leaf, name.rpartition(" ")[2])
    assert command.help
    assert leaf.help.endswith(".")


def test_help_imports_nothing_heavy() -> None:
    ended = run(
        "import sys\n"
        "from lull.cli.app import build_root\n"
        "try:\n    build_root()(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert ended.stdout.splitlines()[-1] == "heavy: []", ended.stdout + ended.stderr
    assert "submit" in ended.stdout


def test_a_missing_extra_is_one_line_that_says_what_to_install() -> None:
    ended = run(
        "import sys\n"
        "sys.modules['fastapi'] = sys.modules['sqlalchemy'] = sys.modules['uvicorn'] = None\n"
        "from lull.cli.app import build_root\n"
        "build_root()(['server', '--data-dir', '/nonexistent/x'])"
    )
    assert ended.returncode == 1
    assert "pip install 'gpu-lull[server]'" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


def test_without_the_cli_extra_lull_says_what_to_install() -> None:
    ended = run("import sys\nsys.modules['typer'] = None\nfrom lull.cli.__main__ import main\nmain()")
    assert ended.returncode == 1
    assert "pip install 'gpu-lull[cli]'" in ended.stderr


def test_usage_errors_are_2() -> None:
    ended = run("from lull.cli.__main__ import main\nimport sys\nsys.argv = ['lull', 'frobnicate']\nmain()")
    assert ended.returncode == 2
    assert "frobnicate" in ended.stderr
