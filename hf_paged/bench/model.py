"""The model that is measured, as far as the runner has to know it: where it is, and what its config says.

Owns the way from a name to a folder that every peer can read, and the folder where peers keep what they made of it.
Loads no weights.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from hf_paged.errors import ConfigError
from hf_paged.model.demo_model import cache_dir, demo_path
from hf_paged.model.loader import DEMO


@dataclass(frozen=True)
class Subject:
    """A model folder. ``name`` is what reports call it; ``longest`` is None where the config gives no limit."""

    name: str
    folder: Path
    scratch: Path
    vocabulary: int
    longest: int | None
    special: frozenset[int]


def subject(model: str) -> Subject:
    """Find a model by ``"demo"``, folder or hub id. Raises ConfigError where there is none."""
    folder = demo_path() if model == DEMO else Path(model)
    if not folder.is_dir():
        folder = _download(model)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the config of {model!r} ({str(error).splitlines()[0]})") from error
    text = config.get_text_config()
    return Subject(
        name=folder.resolve().name if Path(model).is_dir() else model,
        folder=folder.resolve(),
        scratch=cache_dir() / "bench" / f"{folder.resolve().name}-{_fingerprint(folder)}",
        vocabulary=text.vocab_size,
        longest=getattr(text, "max_position_embeddings", None),
        special=_special(folder, text),
    )


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"cannot find {model!r} ({str(error).strip().splitlines()[0]}); give a folder, a hub id, or {DEMO!r}"
        ) from error


def _fingerprint(folder: Path) -> str:
    """Of the config and of the sizes and times of the other files: converted weights must not outlive a change."""
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.iterdir()):
        stat = file.stat()
        found.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return found.hexdigest()[:12]


def _special(folder: Path, config: Any) -> frozenset[int]:
    """Ids that mean something to a model beyond text."""
    sources = [config]
    if (folder / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(folder))
    found: set[int] = set()
    for source in sources:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(source, name, None)
            found |= {*value} if isinstance(value, list) else set() if value is None else {value}
    return frozenset(found)
