from __future__ import annotations

import itertools
import json
from pathlib import Path

from lull.vmm.vllm.tiny_model import FLOAT_BYTES, width_for, write_model

MIB = 1 << 20


def test_what_is_written_is_a_model(tmp_path: Path) -> None:
    nbytes = write_model(tmp_path / "model", MIB, seed=1)
    data = (tmp_path / "model" / "model.safetensors").read_bytes()
    head_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + head_bytes])
    assert len(data) == 8 + head_bytes + nbytes
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    offsets = [value["data_offsets"] for name, value in header.items() if name != "__metadata__"]
    assert offsets[0][0] == 0
    assert all(one[1] == after[0] for one, after in itertools.pairwise(offsets))
    assert header["lm_head.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    tokenizer = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    assert len(set(tokenizer["model"]["vocab"].values())) == 258
    assert tokenizer["model"]["vocab"]["A"] == ord("A")


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_model(tmp_path / name, MIB, seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_the_size_is_near_what_was_asked() -> None:
    for wanted in (16 * MIB, 100 * MIB, 1024 * MIB):
        layers = 64 * width_for(wanted) ** 2 * FLOAT_BYTES
        assert 0.6 * wanted < layers <= wanted
    assert width_for(1) == 64
