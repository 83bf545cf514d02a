"""What is judged of an engine's flags and environment, also of one that runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lull.agents.doctor import engine_flags
from lull.agents.doctor.engine_flags import Started, judge_allocator, judge_flags, judge_nccl
from lull.agents.doctor.findings import Status
from lull.agents.processes import identity
from lull.agents.settings import AgentSettings

OK, WARNING, FAILED = Status.OK, Status.WARNING, Status.FAILED
KEYED = {"TRTLLM_RUNTIME_CONTROL_API_KEY": "k"}
DEV = {"VLLM_SERVER_DEV_MODE": "1"}


@pytest.mark.parametrize(
    ("kind", "words", "environ", "wanted"),
    [
        ("vllm", "vllm serve m --enable-sleep-mode", DEV, [OK]),
        ("vllm", "vllm serve m --enable-sleep-mode", {}, [FAILED]),
        ("vllm", "vllm serve m", DEV, [FAILED]),
        ("vllm", "python -m vllm.entrypoints.openai.api_server --worker-cls lull.x", DEV, [OK]),
        ("vllm", "vllm serve m --enable-sleep-mode -tp 2", DEV, [WARNING]),
        ("vllm", "vllm serve m --enable-sleep-mode --tensor-parallel-size=1", DEV, [OK]),
        ("vllm", "vllm serve m --enable-sleep-mode -tp 2 --disable-custom-all-reduce", DEV, [OK]),
        ("vllm", "vllm serve m --enable_sleep_mode --tensor_parallel_size=1", DEV, [OK]),
        ("vllm", "vllm serve m --enable_sleep_mode --tensor_parallel_size=2", DEV, [WARNING]),
        ("vllm", "vllm serve m --enable-sleep-mode -tp=2 --disable_custom_all_reduce", DEV, [OK]),
        ("vllm", "/opt/start-engine", DEV, [Status.NOT_APPLICABLE]),
        ("sglang", "python -m sglang.launch_server --enable-memory-saver", {}, [OK]),
        ("sglang", "python -m sglang.launch_server", {}, [FAILED]),
        ("trtllm", "trtllm-serve m --enable_sleep_mode", KEYED, [OK]),
        ("trtllm", "trtllm-serve m", {}, [FAILED, FAILED]),
        ("trtllm", "lull engine serve", {}, [Status.NOT_APPLICABLE]),
        ("ollama", "ollama serve", {"OLLAMA_KEEP_ALIVE": "-1"}, [OK]),
        ("ollama", "ollama serve", {}, [WARNING]),
        ("llama-server", "llama-server --no-models-autoload", {}, [OK]),
        ("llama-server", "llama-server", {}, [WARNING]),
        ("llama-server", "llama-server -m x.gguf", {}, [FAILED]),
        ("process", "serve", {}, [Status.NOT_APPLICABLE]),
    ],
)
def test_flags(kind: str, words: str, environ: dict[str, str], wanted: list[Status]) -> None:
    assert [one.status for one in judge_flags("a", Started(kind, words.split(), environ, 1))] == wanted


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_allocator_of_torch(name: str) -> None:
    conf = {name: "max_split_size_mb:64, expandable_segments:True"}
    assert judge_allocator("a", Started("vllm", [], conf, 1)).status is FAILED
    assert judge_allocator("a", Started("vllm", [], {name: "expandable_segments:False"}, 1)).status is OK


def test_nccl() -> None:
    assert judge_nccl("a", Started("vllm", [], {}, 1)).status is Status.NOT_APPLICABLE
    assert judge_nccl("a", Started("vllm", [], {}, 2)).status is WARNING
    assert judge_nccl("a", Started("vllm", [], {"NCCL_GRAPH_REGISTER": "0"}, 2)).status is OK
    assert judge_nccl("a", Started("cuda-checkpoint", [], {"NCCL_GRAPH_REGISTER": "0"}, 2)).status is WARNING
    assert judge_nccl("a", Started("cuda-checkpoint", [], {"NCCL_CUMEM_HOST_ENABLE": "0"}, 2)).status is OK


def test_a_process_that_runs_is_asked_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner may have started it otherwise than the file would."""
    settings = AgentSettings.model_validate(
        {
            "server_url": "http://127.0.0.1:1",
            "token_file": tmp_path / "token",
            "data_dir": tmp_path,
            "devices": [{"path": tmp_path / "device", "capacity_bytes": 1}],
            "engines": [
                {
                    "name": "a",
                    "kind": "ollama",
                    "models": ["a"],
                    "url": "http://127.0.0.1:9",
                    "device_indexes": [0],
                    "command": ["ollama", "serve"],
                    "env": {"OLLAMA_KEEP_ALIVE": "-1"},
                }
            ],
        }
    )
    (engine,) = settings.engines
    monkeypatch.setattr(engine_flags, "engine_process", lambda *_: None)
    assert judge_flags("a", engine_flags.started(settings, engine))[0].status is OK
    environ = {**os.environ, "OLLAMA_KEEP_ALIVE": "5m"}
    wait = [sys.executable, "-I", "-S", "-c", "input()"]
    with subprocess.Popen(wait, stdin=subprocess.PIPE, env=environ) as child:
        monkeypatch.setattr(engine_flags, "engine_process", lambda *_: identity(child.pid))
        found = judge_flags("a", engine_flags.started(settings, engine))
        child.kill()
    assert found[0].status is WARNING
