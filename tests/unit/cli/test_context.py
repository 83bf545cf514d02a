from __future__ import annotations

from pathlib import Path

import pytest

from lull.cli.context import Target, read_config, resolve, token_of, write_context
from lull.cli.exits import CliError, ExitCode
from lull.cli.options import GlobalOptions

CONTEXT = """
current_context = "local"
[contexts.local]
server = "http://127.0.0.1:7171"
token_file = "/run/token"
[contexts.other]
server = "http://other:7070"
"""


def environ(path: Path, **more: str) -> dict[str, str]:
    return {"LULL_CONFIG": str(path), **more}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(CONTEXT)
    return path


def test_without_anything_it_is_this_machine(tmp_path: Path) -> None:
    assert resolve(GlobalOptions(), environ(tmp_path / "none")) == Target("http://127.0.0.1:7070", None)


def test_the_current_context_counts(config: Path) -> None:
    assert resolve(GlobalOptions(), environ(config)) == Target("http://127.0.0.1:7171", Path("/run/token"))


def test_the_environment_is_above_the_file_and_a_flag_above_both(config: Path) -> None:
    both = environ(config, LULL_SERVER="http://env:1/", LULL_TOKEN_FILE="/env")
    assert resolve(GlobalOptions(), both) == Target("http://env:1", Path("/env"))
    flags = GlobalOptions(server="https://flag:2", token_file="/flag")
    assert resolve(flags, both) == Target("https://flag:2", Path("/flag"))


def test_one_servers_token_is_not_sent_to_another(config: Path) -> None:
    assert resolve(GlobalOptions(server="http://elsewhere"), environ(config)).token_file is None
    same = resolve(GlobalOptions(server="http://127.0.0.1:7171/"), environ(config))
    assert same.token_file == Path("/run/token")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("current_context = x\n", "is not TOML.*line 1"),
        ("colour = 1", "unknown key 'colour'"),
        ("current_context = 'x'", r"there is no \[contexts.x\]"),
        ("contexts = 3", "contexts: has to be a table"),
        ("[contexts.a]\nurl = 'x'", "contexts.a: unknown key 'url'"),
        ("[contexts.a]\nserver = 1", "contexts.a.server: has to be a string"),
    ],
)
def test_a_bad_file_is_refused_by_file_and_key(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(content)
    with pytest.raises(CliError, match=told) as refused:
        read_config(path)
    assert str(path) in str(refused.value)
    assert refused.value.code is ExitCode.USAGE


def test_a_server_without_a_scheme_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="http://"):
        resolve(GlobalOptions(server="127.0.0.1:7070"), environ(tmp_path / "none"))


def test_writing_a_context_keeps_the_others(config: Path) -> None:
    write_context(config, "new one", Target('http://new:1"', Path("/tök en")))
    written = read_config(config)
    assert written["current_context"] == "new one"
    assert written["contexts"]["new one"] == {"server": 'http://new:1"', "token_file": "/tök en"}
    assert written["contexts"]["other"] == {"server": "http://other:7070"}


def test_no_token_says_what_to_do() -> None:
    with pytest.raises(CliError, match="--token-file") as refused:
        token_of(Target("http://x", None))
    assert refused.value.code is ExitCode.AUTHENTICATION


def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("lull_" + "x" * 40)
    path.chmod(0o644)
    with pytest.raises(CliError, match="chmod 600"):
        token_of(Target("http://x", path))
