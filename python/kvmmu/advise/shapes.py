"""Models: the shape of their KV and the bytes of their weights.

What lives here: :class:`Shape`, the built-in ones, and :func:`read`, which makes one of a Hugging
Face ``config.json``. What never lives here: anything about a GPU.

Built-in shapes are what the ``config.json`` of each model's own repository says; parameter counts
are those of its model card. A model with multi-head latent attention (MLA) stores one latent vector
and one rotary key a token and layer, whatever its heads: width ``kv_lora_rank + qk_rope_head_dim``,
no V (DeepSeek-V2, arXiv 2405.04434), and each rank of tensor parallelism stores all of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..errors import InvalidConfig

__all__ = ["DTYPE_BYTES", "SHAPES", "Shape", "find", "read"]

DTYPE_BYTES = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
    "int8": 1.0,
}
_MAX_BYTES = 16 << 20
_HF = "config.json of the model's repository"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a model asks of a KV cache.

    Attributes:
        name: of the model, or its file.
        layers: that store KV. kv_heads: a layer, over all ranks. head_dim: of K.
        v_head_dim: of V; 0: there is none (MLA).
        dtype: of the KV.
        weights: bytes of all weights; None: not known.
        weights_from: where that comes from.
        longest: tokens of the longest sequence; None: not known.
        latent: MLA: each rank stores all of it.
        source: where the shape comes from.
        note: what a reader has to know.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str = "bfloat16"
    weights: int | None = None
    weights_from: str = ""
    longest: int | None = None
    latent: bool = False
    source: str = _HF
    note: str = ""

    def heads_of_rank(self, ranks: int) -> int:
        """KV heads that one of so many ranks stores: where there are fewer heads than ranks each
        head is stored more than once."""
        return 1 if self.latent else max(1, -(-self.kv_heads // ranks))

    def token_bytes(self, ranks: int = 1) -> int:
        """Bytes a token over all layers, of one rank."""
        width = self.head_dim + self.v_head_dim
        return int(self.layers * self.heads_of_rank(ranks) * width * DTYPE_BYTES[self.dtype])


def _gqa(
    name: str,
    layers: int,
    kv_heads: int,
    head_dim: int,
    billions: float,
    longest: int,
    weight_bytes: float = 2,
) -> Shape:
    return Shape(
        name=name,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        weights=int(billions * 1e9 * weight_bytes),
        weights_from=f"model card: {billions:g} G parameters of {weight_bytes:g} bytes",
        longest=longest,
    )


def _mla(name: str, layers: int, billions: float, longest: int, weight_bytes: float) -> Shape:
    return Shape(
        name=name,
        layers=layers,
        kv_heads=1,
        head_dim=512 + 64,
        v_head_dim=0,
        weights=int(billions * 1e9 * weight_bytes),
        weights_from=f"model card: {billions:g} G parameters of {weight_bytes:g} bytes",
        longest=longest,
        latent=True,
    )


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        _gqa("SmolLM2-135M", 30, 3, 64, 0.135, 8_192),
        _gqa("Llama-3.2-1B", 16, 8, 64, 1.24, 131_072),
        _gqa("Llama-3.2-3B", 28, 8, 128, 3.21, 131_072),
        _gqa("Llama-3.1-8B", 32, 8, 128, 8.03, 131_072),
        _gqa("Llama-3.1-70B", 80, 8, 128, 70.6, 131_072),
        _gqa("Llama-3.3-70B", 80, 8, 128, 70.6, 131_072),
        _gqa("Llama-3.1-405B", 126, 8, 128, 406, 131_072),
        _gqa("Mistral-7B-v0.3", 32, 8, 128, 7.25, 32_768),
        _gqa("Mixtral-8x7B", 32, 8, 128, 46.7, 32_768),
        _gqa("Qwen2.5-7B", 28, 4, 128, 7.62, 131_072),
        _gqa("Qwen2.5-32B", 64, 8, 128, 32.8, 131_072),
        _gqa("Qwen2.5-72B", 80, 8, 128, 72.7, 131_072),
        _gqa("Qwen3-8B", 36, 8, 128, 8.19, 40_960),
        _gqa("Qwen3-32B", 64, 8, 128, 32.8, 40_960),
        _gqa("Qwen3-30B-A3B", 48, 4, 128, 30.5, 40_960),
        _gqa("Qwen3-235B-A22B", 94, 4, 128, 235, 40_960),
        _gqa("Phi-4", 40, 10, 128, 14.7, 16_384),
        _mla("DeepSeek-V2-Lite", 27, 15.7, 163_840, 2),
        _mla("DeepSeek-V3", 61, 671, 163_840, 1),
        _mla("Kimi-K2", 61, 1_000, 131_072, 1),
    )
}


def find(model: str) -> Shape:
    """A built-in shape by its name (however it is capitalised), or that of a file.

    Raises:
        InvalidConfig: neither.
    """
    by_name = {name.lower(): shape for name, shape in SHAPES.items()}
    name = model.rsplit("/", 1)[-1].lower()
    for ending in ("-instruct", "-chat", "-hf"):
        name = name.removesuffix(ending)
    if name in by_name and not Path(model).is_file():
        return by_name[name]
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or path.exists():
        return read(path)
    near = get_close_matches(name, by_name, n=3)
    listed = ", ".join(by_name[n].name for n in near) if near else ", ".join(SHAPES)
    raise InvalidConfig(
        f"--model: {model} given, allowed: a config.json, or a name such as {listed}"
    )


def read(path: Path) -> Shape:
    """The shape that a Hugging Face ``config.json`` describes.

    Layers of linear attention store no KV by the token and are left out; layers of sliding windows
    are counted as if they kept all of it, as a pool of one kind of block does.

    Raises:
        InvalidConfig: names the file and the key.
    """
    whole = _json(path)
    config = whole.get("text_config", whole)
    if not isinstance(config, dict):
        raise InvalidConfig(f"{path}: text_config: {config!r} given, allowed: an object")
    layers = _whole(path, config, "num_hidden_layers")
    notes = []
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        linear = sum("linear" in str(kind) or "mamba" in str(kind) for kind in kinds)
        sliding = sum("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds)
        if linear:
            notes.append(f"{linear} of {layers} layers are linear and store no KV by the token")
            layers -= linear
        if sliding:
            notes.append(f"{sliding} layers have windows, and are counted as if they kept all")
    latent = config.get("kv_lora_rank") is not None
    if latent:
        heads, v_dim = 1, 0
        dim = _whole(path, config, "kv_lora_rank") + _whole(path, config, "qk_rope_head_dim")
    else:
        query_heads = _whole(path, config, "num_attention_heads")
        heads = _whole(path, config, "num_key_value_heads", query_heads)
        hidden = None if "head_dim" in config else _whole(path, config, "hidden_size")
        dim = _whole(path, config, "head_dim", None if hidden is None else hidden // query_heads)
        v_dim = _whole(path, config, "v_head_dim", dim)
    for what, number in (("layers that store KV", layers), ("head_dim", dim)):
        if number < 1:
            raise InvalidConfig(f"{path}: {what}: {number} given, allowed: a whole number from 1")
    weights, weights_from = _weights(path, whole, config)
    named = config.get("dtype", config.get("torch_dtype", whole.get("torch_dtype", "bfloat16")))
    dtype = str(named).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise InvalidConfig(
            f"{path}: torch_dtype: {dtype} given, allowed: {', '.join(DTYPE_BYTES)}"
        )
    return Shape(
        name=str(path),
        layers=layers,
        kv_heads=heads,
        head_dim=dim,
        v_head_dim=v_dim,
        dtype=dtype,
        weights=weights,
        weights_from=weights_from,
        longest=_whole(path, config, "max_position_embeddings", 0) or None,
        latent=latent,
        source=str(path),
        note="; ".join(notes),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES} bytes")
        found = json.loads(raw)
    except OSError as error:
        raise InvalidConfig(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"{path}: this is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidConfig(f"{path}: allowed: a JSON object, as a config.json is")
    return found


def _whole(path: Path, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**31:
        given = "missing" if value is None else f"{value!r} given"
        raise InvalidConfig(f"{path}: {key}: {given}, allowed: a whole number from 1")
    return value


def _weights(
    path: Path, whole: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[int | None, str]:
    """Bytes of the weights, from the index beside the file, if there is one."""
    index = path.with_name("model.safetensors.index.json")
    if index.is_file():
        total = _json(index).get("metadata", {})
        size = total.get("total_size") if isinstance(total, dict) else None
        if isinstance(size, int | float) and not isinstance(size, bool) and 0 < size < math.inf:
            return int(size), str(index)
    alone = path.with_name("model.safetensors")
    if alone.is_file():
        return alone.stat().st_size, str(alone)
    return None, "not known: no model.safetensors(.index.json) beside the file"
