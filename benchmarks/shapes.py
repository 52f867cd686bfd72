"""Folders with models of other shapes and random weights, for ``hf-paged bench --synthetic``.

    python benchmarks/shapes.py llama-600m FOLDER
    hf-paged bench FOLDER --synthetic --only W3 --peers hf-paged,stock,stock-batch

A Llama of 0.6 billion weights (grouped-query attention, heads of 128), and a Qwen3-MoE of 0.5 billion, of which a token
uses a part.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers as tf

_COMMON: dict[str, Any] = {"vocab_size": 32_000, "max_position_embeddings": 8192, "tie_word_embeddings": True}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-600m": (
        "LlamaConfig",
        {
            "hidden_size": 1280, "intermediate_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 10,
            "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
        },
    ),
    "qwen3-moe-500m": (
        "Qwen3MoeConfig",
        {
            "hidden_size": 768, "intermediate_size": 2048, "moe_intermediate_size": 384, "num_hidden_layers": 16,
            "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32,
            "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        },
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    kind, arguments = SHAPES[options.shape]
    torch.manual_seed(0)
    config = getattr(tf, kind)(**_COMMON, **arguments, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    model.generation_config.pad_token_id = 0
    model.save_pretrained(options.folder)
    print(f"{options.folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million weights")


if __name__ == "__main__":
    main()
