"""From a Llama's Hugging Face folder to a GGUF file with the same weights and no vocabulary: peers speak in token ids.

Reads safetensors by hand, since numpy has no bfloat16. Architectures other than Llama's are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

_TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "float16": gguf.GGMLQuantizationType.F16,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
}


def write_gguf(folder: Path, dtype: str, path: Path) -> None:
    """Write the model of ``folder``, matrices in ``dtype`` and norms in fp32."""
    config = json.loads((folder / "config.json").read_text())
    if config["architectures"] != ["LlamaForCausalLM"]:
        raise ValueError(f"only Llama models are converted for llama.cpp, not {config['architectures']}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rotary embeddings of type {rope['rope_type']!r} are not converted for llama.cpp")
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, values in _tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _interleaved(values, heads if "q_proj" in name else kv_heads)
        kind = _TYPES[dtype] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ValueError(f"{name} has no place in a Llama's GGUF file")
        writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """GGUF keeps the two numbers that rotate together side by side; transformers keeps them half a head apart."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the folder's safetensors files, in fp32."""
    for file in sorted(folder.glob("*.safetensors")):
        data = np.memmap(file, np.uint8, "r")
        size = int(data[:8].view("<u8")[0])
        header = json.loads(data[8 : 8 + size].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            yield name, _fp32(data[start:end], entry["dtype"]).reshape(entry["shape"])


def _fp32(raw: np.ndarray, dtype: str) -> np.ndarray:
    content = raw.tobytes()
    if dtype == "BF16":
        return (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype in ("F32", "F16"):
        return np.frombuffer(content, "<f4" if dtype == "F32" else "<f2").astype(np.float32)
    raise ValueError(f"weights of type {dtype} are not converted for llama.cpp")
