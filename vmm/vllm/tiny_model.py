"""A random Llama with a tokenizer of bytes, written to a directory: for trying an engine with nothing to download.

    python -m lull.vmm.vllm.tiny_model DIRECTORY [--weights-mib 16] [--seed 0]

Its answers are greedy, printable and say nothing; they tell two sets of weights apart. Needs torch alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

LAYERS: Final = 4
HEAD_WIDTH: Final = 64
VOCABULARY: Final = 320  # 256 bytes, two marks, and room to a multiple of 64
CONTEXT_TOKENS: Final = 512
FLOAT_BYTES: Final = 4
WIDTH_MIN: Final = HEAD_WIDTH
_MLP: Final = 4  # times the width
_STANDARD_DEVIATION: Final = 0.2  # large: every weight has a part in every token
_BEGIN, _END = 256, 257


def width_for(weights_bytes: int) -> int:
    """The hidden size whose model comes closest to ``weights_bytes`` from below; never less than one head."""
    of_square = LAYERS * (4 + 3 * _MLP) * FLOAT_BYTES  # four attention matrices and three of the MLP, each layer
    width = math.isqrt(weights_bytes // of_square) // HEAD_WIDTH * HEAD_WIDTH
    return max(WIDTH_MIN, width)


def write_model(directory: Path, weights_bytes: int, seed: int = 0) -> int:
    """Writes config, tokenizer and weights; tells how many bytes the weights have."""
    directory.mkdir(parents=True, exist_ok=True)
    width = width_for(weights_bytes)
    documents = {"config": _config(width), "tokenizer": _tokenizer(), "tokenizer_config": _tokenizer_config()}
    for name, document in documents.items():
        (directory / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    return _write_weights(directory / "model.safetensors", width, seed)


def _config(width: int) -> dict[str, Any]:
    heads = width // HEAD_WIDTH
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": _MLP * width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": HEAD_WIDTH,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_theta": 10000.0,
        "bos_token_id": _BEGIN,
        "eos_token_id": _END,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself where it is printable."""
    letters: list[str] = []
    substitutes = 0
    for byte in range(256):
        printable = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF
        letters.append(chr(byte) if printable else chr(256 + substitutes))
        substitutes += not printable
    return letters


def _tokenizer() -> dict[str, Any]:
    marks = {"<s>": _BEGIN, "</s>": _END}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": text, **flags} for text, number in marks.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {letter: byte for byte, letter in enumerate(_byte_letters())} | marks,
            "merges": [],
        },
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": CONTEXT_TOKENS,
    }


def _shapes(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, width)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (width,)
        yield f"{prefix}.post_attention_layernorm.weight", (width,)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}.self_attn.{name}.weight", (width, width)
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}.mlp.{name}.weight", (_MLP * width, width)
        yield f"{prefix}.mlp.down_proj.weight", (width, _MLP * width)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (VOCABULARY, width)


def _write_weights(path: Path, width: int, seed: int) -> int:
    """As safetensors: the length of a header, the header, the tensors one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in _shapes(width):
        begin, end = end, end + math.prod(shape) * FLOAT_BYTES
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in _shapes(width):
            tensor = _values(name, shape, generator)
            file.write(ctypes.string_at(tensor.data_ptr(), tensor.numel() * FLOAT_BYTES))
    return end


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape)
    # By the square root of the width, so that a layer of any width changes what it is given by as much.
    scale = _STANDARD_DEVIATION * math.sqrt(256 / shape[1])
    values = torch.randn(shape, generator=generator) * scale
    if name == "lm_head.weight":
        values[:0x21] = 0.0  # nothing but printable answers, and none that ends by itself
        values[0x7F:] = 0.0
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random Llama.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--weights-mib", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_model(arguments.directory, arguments.weights_mib << 20, arguments.seed)


if __name__ == "__main__":
    main()
