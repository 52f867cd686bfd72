"""Tiny random-weight models of every architecture the package claims, built in milliseconds.

Weights are scaled up so that greedy tokens vary and a wrong cache shows; windows and chunks are shorter than the
prompts used in the tests, so their borders are crossed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers as tf

VOCAB = 97
PAD = 0
_BASE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=PAD, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_GPT = dict(
    vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=256, pad_token_id=PAD, bos_token_id=1, eos_token_id=2
)


def _moe(**more: Any) -> dict[str, Any]:
    return {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2, **more}


_RECURRENT = dict(mamba_d_state=8, mamba_d_conv=4, mamba_expand=2)

#: name -> (config class, arguments)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_BASE}),
    "qwen3": ("Qwen3Config", {**_BASE, "head_dim": 8}),
    "mistral": ("MistralConfig", {**_BASE, "sliding_window": 7}),
    "gemma2": ("Gemma2Config", {**_BASE, "head_dim": 8, "sliding_window": 7, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {**_BASE, "head_dim": 8, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "query_pre_attn_scalar": 8}),
    "gpt_oss": ("GptOssConfig", {**_moe(), "head_dim": 8, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "gpt2": ("GPT2Config", {**_GPT}),
    "opt": ("OPTConfig", {**{k: v for k, v in _BASE.items() if k not in ("intermediate_size", "num_key_value_heads")}, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "mixtral": ("MixtralConfig", {**_moe(), "sliding_window": None}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_BASE, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "deepseek_v3": ("DeepseekV3Config", {**_BASE, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1}),
    "qwen3_next": ("Qwen3NextConfig", {**_BASE, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}),
    "qwen3_5": ("Qwen3_5TextConfig", {**_BASE, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}),
    "mamba2": ("Mamba2Config", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "expand": 2, "chunk_size": 8, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}),
    "jamba": ("JambaConfig", {**_BASE, **_RECURRENT, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False}),
    "bamba": ("BambaConfig", {**_BASE, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 8}),
    "bloom": ("BloomConfig", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}),
    "falcon": ("FalconConfig", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "alibi": False, "new_decoder_architecture": False, "multi_query": True, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}),
    "mpt": ("MptConfig", {"vocab_size": VOCAB, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 256, "use_cache": True, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt_neox": ("GPTNeoXConfig", {k: v for k, v in _BASE.items() if k != "num_key_value_heads"}),
    "gptj": ("GPTJConfig", {**_GPT, "rotary_dim": 4}),
    "phi3": ("Phi3Config", {**_BASE, "sliding_window": None}),
    "granite": ("GraniteConfig", {**_BASE}),
    "olmo2": ("Olmo2Config", {**_BASE}),
    "llama4": ("Llama4TextConfig", {**_BASE, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 8, "interleave_moe_layer_step": 2, "num_hidden_layers": 4, "layer_types": ["chunked_attention", "full_attention", "chunked_attention", "full_attention"]}),
    "gemma3n": ("Gemma3nTextConfig", {**_BASE, "head_dim": 8, "num_hidden_layers": 4, "intermediate_size": [48] * 4, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"], "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4}),
    "lfm2": ("Lfm2Config", {**_BASE, "layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 48, "conv_L_cache": 3}),
    "t5": ("T5Config", {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": PAD, "eos_token_id": 2, "decoder_start_token_id": PAD}),
    "bart": ("BartConfig", {"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 256, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None}),
}  # fmt: skip

ENCODER_DECODER = ("t5", "bart")
#: keys and values are not plain per-token tensors, so that no block can hold them
NO_KV = ("mamba2",)
#: state that is not per token: no prefix reuse, cropping only as stock allows
RECURRENT = ("qwen3_next", "qwen3_5", "mamba2", "jamba", "bamba", "lfm2")
#: served by kernels on blocks; the others have their keys gathered
NATIVE = (
    "llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2", "opt", "mixtral", "qwen3_moe", "qwen3_next",
    "qwen3_5", "jamba", "bamba", "gpt_neox", "gptj", "phi3", "granite", "olmo2", "llama4", "gemma3n", "lfm2", "bart",
)  # fmt: skip
GATHERED = ("deepseek_v3", "bloom", "falcon", "mpt", "t5")
ALL = tuple(CONFIGS)


@functools.cache
def config_of(name: str) -> Any:
    kind, arguments = CONFIGS[name]
    return getattr(tf, kind)(**arguments)


@functools.cache
def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A shared model; tests must not change its weights (use :func:`fresh` for that)."""
    return fresh(name, seed, dtype)


def fresh(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    kind, arguments = CONFIGS[name]
    config = getattr(tf, kind)(**arguments)
    auto = tf.AutoModelForSeq2SeqLM if name in ENCODER_DECODER else tf.AutoModelForCausalLM
    kwargs = {"attn_implementation": "eager"} if name in ("gemma2", "gpt_oss") else {}
    model = auto.from_config(config, **kwargs)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embed" not in parameter_name and "norm" not in parameter_name:
                parameter.normal_(0.0, 0.25)
            elif "sinks" in parameter_name:
                parameter.normal_(0.0, 1.0)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                # zero keys and values would be just what is stored for padding: a leak could not be seen
                module.weight[module.padding_idx].normal_(0.0, float(module.weight.std()))
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval()
