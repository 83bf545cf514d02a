"""Fields of one kind of engine that are missing, misplaced or beyond what the kind can do, told by file and line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from lull.agents.engine_fields import KINDS_OF
from lull.agents.protocol.config_file import ConfigFileError, load_toml
from lull.agents.protocol.engine_kinds import EngineKind
from lull.agents.settings import AgentSettings, EngineSettings

ROOT = Path(__file__).parents[3]
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
            "cuda_checkpoint.processes_max: only for kind 'cuda-checkpoint'",
        ),
    ],
)
def test_a_wrong_one_names_file_line_and_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigFileError) as caught:
        load(tmp_path, text)
    words = str(caught.value)
    assert words.startswith(f"{tmp_path}/agent.toml:"), words
    assert says in words, words


# A field or the header of its table, and the line to write it, where it has no use.
WRITTEN = {
    "control_key_file": 'control_key_file = "/x"',
    "health_path": 'health_path = "/health"',  # its default, but it was written
    "park_command": 'park_command = ["park"]',
    "resume_command": 'resume_command = ["resume"]',
    "observe_command": 'observe_command = ["observe"]',
    "observe_seconds_max": "observe_seconds_max = 3",
    "vllm.reload": '[engines.vllm]\nreload = "reload_weights"',
    "vllm.loras": '[engines.vllm]\nloras = ["french"]',
    "vllm.allow_fragile": "[engines.vllm]\nallow_fragile = false",
    "cuda_checkpoint.pids_from": '[engines.cuda_checkpoint]\npids_from = "port"',
    "cuda_checkpoint.processes_max": "[engines.cuda_checkpoint]\nprocesses_max = 2",
    "cuda_checkpoint.lock_seconds_max": "[engines.cuda_checkpoint]\nlock_seconds_max = 3",
}


@pytest.mark.parametrize("field", KINDS_OF)
def test_a_field_of_other_kinds_is_refused_where_it_stands(tmp_path: Path, field: str) -> None:
    kind = "sglang" if "sglang" not in KINDS_OF[field] else "ollama"
    with pytest.raises(ConfigFileError) as caught:
        load(tmp_path, f'kind = "{kind}"\n{WRITTEN[field]}\n')
    line = len(HEAD.splitlines()) + 1 + len(WRITTEN[field].splitlines())
    assert str(caught.value).startswith(f"{tmp_path}/agent.toml:{line}: engines.0.{field}: only for kind ")
    assert all(repr(one) in str(caught.value) for one in KINDS_OF[field])


@pytest.mark.parametrize("text", ['env = { A = "b" }', "health_seconds_max = 300", "stop_seconds_max = 3"])
def test_what_the_start_of_an_engine_needs_is_refused_where_somebody_else_starts_it(tmp_path: Path, text: str) -> None:
    field = text.partition(" ")[0]
    with pytest.raises(ConfigFileError, match=f"engines.0.{field}: only with a command"):
        load(tmp_path, f'kind = "ollama"\n{text}\n')
    load(tmp_path, f'kind = "ollama"\ncommand = ["ollama", "serve"]\n{text}\n')


def test_an_attached_engine_that_is_tried_out_waits_for_its_turn(tmp_path: Path) -> None:
    assert load(tmp_path, 'kind = "ollama"\ntrial_park = true\nhealth_seconds_max = 9\n').health_seconds_max == 9


@pytest.mark.parametrize("kind", get_args(EngineKind))
def test_the_api_key_file_is_for_all(tmp_path: Path, kind: str) -> None:
    needs = {"trtllm": 'control_key_file = "/x"\n', "command": COMMANDS, "process": 'command = ["serve"]\n'}
    assert load(tmp_path, f'kind = "{kind}"\n{needs.get(kind, "")}api_key_file = "/y"\n').api_key_file is not None


def test_the_documented_kinds_of_each_field_are_those_of_the_table() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    documented: dict[str, set[str]] = {}
    for names, kinds in rows:
        table, _, fields = names.rpartition("]` ")
        prefix = f"{table.split('.')[-1]}." if table else ""
        for field in re.findall(r"`([a-z_]+)`", fields):
            documented[prefix + field] = {one.split(" (")[0].strip() for one in kinds.split(",")}
    assert {field: documented.get(field) for field in KINDS_OF} == {
        field: set(kinds) for field, kinds in KINDS_OF.items()
    }
