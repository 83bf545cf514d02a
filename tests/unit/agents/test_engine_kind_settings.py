"""Fields of one kind of engine that are missing, misplaced or beyond what the kind can do, told by file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lull.agents.protocol.config_file import ConfigFileError, load_toml
from lull.agents.settings import AgentSettings, EngineSettings

HEAD = """\
server_url = "http://127.0.0.1:7070"
token_file = "/run/token"
data_dir = "/var/lib/lull"

[[devices]]
path = "/var/lib/lull/device0"
capacity_bytes = "1GiB"

[[engines]]
name = "alpha"
models = ["Qwen/Qwen3-8B", "llama3.2:3b"]
url = "http://127.0.0.1:9001"
device_indexes = [0]
"""
NONE = {"model_weights": "NONE", "kv_cache": "NONE"}
COMMANDS = 'park_command = ["park"]\nresume_command = ["resume"]\nobserve_command = ["observe"]\n'


def load(tmp_path: Path, text: str) -> EngineSettings:
    path = tmp_path / "agent.toml"
    path.write_text(HEAD + text)
    return load_toml(path, AgentSettings).engines[0]


@pytest.mark.parametrize(
    ("text", "modes"),
    [
        ('kind = "sglang"\n', {"model_weights": "CPU", "kv_cache": "NONE"}),
        ('kind = "lmdeploy"\n', {"model_weights": "CPU", "kv_cache": "NONE"}),
        ('kind = "llama-server"\n', NONE),
        ('kind = "ollama"\n', NONE),
        ('kind = "process"\ncommand = ["serve"]\n', NONE),
        ('kind = "cuda-checkpoint"\n', {"model_weights": "CPU", "kv_cache": "CPU"}),
        (f'kind = "command"\n{COMMANDS}', NONE),
        ('kind = "process"\ncommand = ["serve"]\n[engines.policy]\nwhen = "always"\n', NONE),
    ],
)
def test_each_kind_loads_with_its_usual_modes(tmp_path: Path, text: str, modes: dict[str, str]) -> None:
    assert load(tmp_path, text).policy.restore_modes == modes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('kind = "sg-lang"\n', "kind: "),
        ('kind = "process"\n', "command: an engine of kind 'process' is parked by ending it"),
        ('kind = "command"\n', "park_command: missing"),
        ('kind = "ollama"\npark_command = ["park"]\n', "park_command: only for kind 'command'"),
        ('kind = "command"\n' + COMMANDS.replace('["observe"]', "[]"), "observe_command: "),
        (
            'kind = "ollama"\n[engines.policy]\nrestore_modes = { model_weights = "CPU", kv_cache = "NONE" }\n',
            'restore_modes = { model_weights = "NONE", kv_cache = "NONE" }',
        ),
        (
            'kind = "lmdeploy"\n[engines.policy]\nrestore_modes = { kv_cache = "NONE" }\n',
            'restore_modes = { model_weights = "CPU", kv_cache = "NONE" }',
        ),
        ('kind = "process"\ncommand = ["serve"]\nhealth_path = "health"\n', "health_path: "),
        (
            'kind = "cuda-checkpoint"\n[engines.policy]\nrestore_modes = { kv_cache = "NONE" }\n',
            'restore_modes = { model_weights = "CPU", kv_cache = "CPU" }',
        ),
        (
            'kind = "cuda-checkpoint"\n[engines.cuda_checkpoint]\npids_from = "command"\n',
            "cuda_checkpoint.pids_from: there is no command",
        ),
        (
            'kind = "cuda-checkpoint"\n[engines.cuda_checkpoint]\nprocesses_max = 0\n',
            "cuda_checkpoint.processes_max: ",
        ),
        (
            'kind = "ollama"\n[engines.cuda_checkpoint]\nprocesses_max = 2\n',
            "cuda_checkpoint: only for kind 'cuda-checkpoint'",
        ),
    ],
)
def test_a_wrong_one_names_file_line_and_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigFileError) as caught:
        load(tmp_path, text)
    words = str(caught.value)
    assert words.startswith(f"{tmp_path}/agent.toml:"), words
    assert says in words, words
