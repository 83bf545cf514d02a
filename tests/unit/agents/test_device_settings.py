"""The `[[devices]]` of an agent's file: every mistake is named with its place and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from lull.agents.protocol.config_file import ConfigFileError, load_toml
from lull.agents.settings import AgentSettings

HEAD = 'server_url = "http://127.0.0.1:7070"\ntoken_file = "token"\ndata_dir = "agent"\n'
HOST = '[[devices]]\npath = "device0"\ncapacity_bytes = "1GiB"\n'
GPU = '[[devices]]\nkind = "nvidia"\nuuid = "GPU-66616b65-2d67-7075-0000-000000000000"\n'
ENGINE = """
[[engines]]
name = "alpha"
models = ["alpha"]
url = "http://127.0.0.1:9001"
control_key_file = "key"
"""


def load(tmp_path: Path, text: str) -> AgentSettings:
    path = tmp_path / "agent.toml"
    path.write_text(HEAD + text)
    return load_toml(path, AgentSettings)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[devices]]\nkind = "nvidia"\n', "agent.toml:4: devices.0.uuid: name the GPU by its uuid"),
        (GPU + "index = 0\n", "devices.0.uuid: name the GPU by its uuid (nvidia-smi -L prints it), or by its index"),
        (GPU + 'path = "x"\n', "agent.toml:7: devices.0.path: only for kind 'host'"),
        (GPU + 'memory = "unified"\n', "devices.0.memory: only for kind 'host'"),
        (HOST + 'uuid = "GPU-66616b65"\n', "devices.0.uuid: only for kind 'nvidia'"),
        (HOST + "index = 1\n", "devices.0.index: only for kind 'nvidia'"),
        (HOST + 'reserve_bytes = "1GiB"\n', "devices.0.reserve_bytes: only with memory = 'unified'"),
        (HOST + 'memory = "unified"\nmemory_service = true\n', "devices.0.memory_service: what it parks would stay"),
        ('[[devices]]\ncapacity_bytes = "1GiB"\n', "devices.0.path: missing"),
        ('[[devices]]\npath = "x"\n', "devices.0.capacity_bytes: missing"),
        ('[[devices]]\nkind = "nvidia"\nuuid = "0"\n', "agent.toml:6: devices.0.uuid: String should match"),
        (GPU + GPU, "devices.1.uuid: GPU-66616b65-2d67-7075-0000-000000000000 is device 0 already"),
        (HOST + HOST, "devices.1.path: "),
        (HOST + GPU + ENGINE + "device_indexes = [0, 1]\n", "engines.0.device_indexes: an engine lives on GPUs or"),
        (
            GPU
            + ENGINE
            + 'device_indexes = [0]\ncommand = ["x", "{restore_mode_flags}"]\nenv = { CUDA_VISIBLE_DEVICES = "0" }\n',
            "engines.0.env: CUDA_VISIBLE_DEVICES is set from device_indexes, by UUID",
        ),
        (
            HOST + 'memory = "unified"\n' + ENGINE + "device_indexes = [0]\n",
            "engines.0.policy.restore_modes: model_weights = 'CPU' frees nothing on unified memory",
        ),
        (
            HOST
            + 'memory = "unified"\n'
            + ENGINE
            + 'device_indexes = [0]\npolicy = { restore_modes = { kv_cache = "PINNED" } }\n',
            "engines.0.policy.restore_modes: kv_cache = 'PINNED' frees nothing on unified memory",
        ),
    ],
)
def test_what_is_wrong_with_a_device_is_said_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigFileError) as caught:
        load(tmp_path, text)
    assert said in str(caught.value)


def test_devices_of_both_kinds_live_on_one_node(tmp_path: Path) -> None:
    mig = '[[devices]]\nkind = "nvidia"\nuuid = "MIG-GPU-66616b65/3/0"\n'
    unified = '[[devices]]\npath = "u"\ncapacity_bytes = "1GiB"\nmemory = "unified"\nreserve_bytes = "2GiB"\n'
    cache_only = ENGINE + 'device_indexes = [3]\npolicy = { restore_modes = { kv_cache = "NONE" } }\n'
    settings = load(tmp_path, HOST + GPU + mig + unified + cache_only)
    assert [device.kind for device in settings.devices] == ["host", "nvidia", "nvidia", "host"]
    assert settings.devices[0].path == tmp_path / "device0"
    assert settings.devices[3].reserve_bytes == 2 << 30
