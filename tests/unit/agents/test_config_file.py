"""A wrong agent.toml names file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from lull.agents.protocol.config_file import ConfigFileError, load_toml
from lull.agents.protocol.sizes import parse_bytes
from lull.agents.settings import AgentSettings

GOOD = """\
server_url = "http://127.0.0.1:7070"
token_file = "/run/token"
data_dir = "/var/lib/lull"
node_name = "box"

[[devices]]
path = "/var/lib/lull/device0"
capacity_bytes = "1.5GiB"

[[engines]]
name = "alpha"
models = ["alpha"]
url = "http://127.0.0.1:9001"
device_indexes = [0]
control_key_file = "/run/alpha.key"

[engines.policy]
when = "always"
"""


TWICE = """\
[[engines]]
name = "alpha"
models = ["beta"]
url = "http://127.0.0.1:9002"
device_indexes = [0]
control_key_file = "/run/beta.key"
"""


def load(tmp_path: Path, text: str) -> AgentSettings:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    return load_toml(path, AgentSettings)


def test_a_good_file(tmp_path: Path) -> None:
    settings = load(tmp_path, GOOD)
    assert settings.devices[0].capacity_bytes == 3 << 29
    assert settings.engines[0].policy.when == "always"


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ('node_name = "box"', 'node_nam = "box"', 4, "node_nam: unknown key"),
        ('capacity_bytes = "1.5GiB"', 'capacity_bytes = "1.5 apples"', 8, "devices.0.capacity_bytes: '1.5 apples'"),
        ('url = "http://127.0.0.1:9001"', 'url = "http://10.0.0.1:9001"', 13, "engines.0.url"),
        ('url = "http://127.0.0.1:9001"', 'url = "http://127.0.0.1:90011"', 13, "a port that does not exist"),
        ('url = "http://127.0.0.1:9001"', 'url = "http://127.0.0.1:8070"', 13, "is where the gateway itself listens"),
        ("device_indexes = [0]", "device_indexes = [false]", 14, "has to be a number, not false"),
        ('when = "always"', 'when = "idle"', 18, "not obeyed yet"),
        ('when = "always"', "recall_waiting_seconds = 5", 18, "recall_waiting_seconds"),
        ('when = "always"', 'restore_modes = {model_weights = "NONE"}', 18, 'model_weights = "CPU"'),
        ("device_indexes = [0]", "device_indexes = [3]", 14, "engines.0.device_indexes: there is no device 3"),
        ("device_indexes = [0]", "device_indexes = [0, 0]", 14, "engines.0.device_indexes: each device once"),
        ("[engines.policy]", TWICE + "[engines.policy]", 18, "engines.1.name: every engine needs a name of its own"),
        ('name = "alpha"', "name = ", 11, "Invalid value"),
    ],
)
def test_an_error_names_file_line_and_key(tmp_path: Path, old: str, new: str, line: int, says: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigFileError) as caught:
        load(tmp_path, GOOD.replace(old, new))
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/agent.toml:{line}: "), text
    assert says in text


def test_a_missing_file_and_a_missing_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match="No such file"):
        load_toml(tmp_path / "none.toml", AgentSettings)
    with pytest.raises(ConfigFileError, match=r"/agent\.toml: token_file: is missing"):  # it is on no line
        load(tmp_path, GOOD.replace('token_file = "/run/token"\n', ""))


def test_relative_paths_start_at_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    text = GOOD.replace('"/run/token"', '"token"').replace('"/var/lib/lull/device0"', '"devices/0"')
    settings = load(tmp_path, text.replace('"/run/alpha.key"', '"../alpha.key"'))
    assert settings.token_file == tmp_path / "token"
    assert settings.devices[0].path == tmp_path / "devices" / "0"
    assert settings.engines[0].control_key_file == tmp_path / ".." / "alpha.key"
    assert settings.data_dir == Path("/var/lib/lull")
    monkeypatch.chdir(tmp_path)
    given = {"data_dir": Path("here"), "token_file": Path("there")}
    settings = load_toml(Path("agent.toml"), AgentSettings, given)
    assert (settings.data_dir, settings.token_file) == (tmp_path / "here", tmp_path / "there")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1GiB", 1 << 30), ("512 MiB", 512 << 20), ("3", 3), (7, 7), ("1.5kB", 1500), ("2tib", 2 << 40)],
)
def test_sizes(text: object, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 furlong", "9" * 400, True, 1.5, None])
def test_what_is_not_a_size(text: object) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


def test_several_engines_may_serve_one_model(tmp_path: Path) -> None:
    """The gateway balances them."""
    text = GOOD + TWICE.replace('name = "alpha"', 'name = "beta"').replace('["beta"]', '["alpha", "beta"]')
    (tmp_path / "agent.toml").write_text(text)
    settings = load_toml(tmp_path / "agent.toml", AgentSettings)
    assert [engine.models for engine in settings.engines] == [["alpha"], ["alpha", "beta"]]
