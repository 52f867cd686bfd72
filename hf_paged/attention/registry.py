"""Which backend serves a layer. Knows the backends' declarations, not their kernels, and no models.

``select`` is asked once per layer when its storage is made; ``report`` is what ``hf-paged doctor`` prints.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch

from hf_paged.attention.backends.base import AttentionBackend
from hf_paged.attention.metadata import LayerSpec
from hf_paged.errors import ConfigError, UnsupportedError

logger = logging.getLogger("hf_paged")

#: the model's own attention on gathered keys and values; not a backend, storage is the reference layout
GATHER = "gather"
AUTO = "auto"


@functools.cache
def backends() -> dict[str, AttentionBackend]:
    """Every backend this package has, best first, whether it can run here or not."""
    from hf_paged.attention.backends.cpu_native import CpuNativeBackend
    from hf_paged.attention.backends.torch_reference import TorchReferenceBackend

    found: list[AttentionBackend] = [CpuNativeBackend(), TorchReferenceBackend()]
    found.sort(key=lambda b: -b.priority)
    return {b.name: b for b in found}


def check_name(name: str) -> None:
    """Raise ConfigError unless ``name`` is "auto", "gather" or a backend."""
    if name not in (AUTO, GATHER) and name not in backends():
        known = ", ".join([AUTO, *backends(), GATHER])
        raise ConfigError(f"attention_backend={name!r} is not known; choose one of: {known}")


def select(spec: LayerSpec, block_size: int, name: str = AUTO) -> AttentionBackend:
    """The backend for layers like ``spec``: the named one, or with "auto" the best that supports it.

    A named backend that cannot serve the layer is replaced by the best one that can, with one log line. Raises
    ConfigError for an unknown name.
    """
    check_name(name)
    if name == GATHER:
        return backends()["torch"]
    reasons: list[str] = []
    candidates = list(backends().values())
    if name != AUTO:
        candidates.sort(key=lambda b: b.name != name)
    for backend in candidates:
        reason = backend.unavailable() or backend.unsupported(spec, block_size)
        if reason is None:
            if name not in (AUTO, backend.name):
                _log_once(f"attention_backend={name!r} cannot serve this layer ({reasons[0]}); using {backend.name!r}")
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise UnsupportedError(f"no attention backend can store layers of {spec}: " + "; ".join(reasons))


@functools.cache
def _log_once(message: str) -> None:
    logger.warning(message)


@dataclass(frozen=True)
class BackendReport:
    """One line of ``hf-paged doctor``: what a backend says about this machine."""

    name: str
    available: bool
    chosen: bool
    reason: str


def report(device: torch.device | None = None, block_size: int = 16) -> list[BackendReport]:
    """For a usual layer (8 KV heads of 128, bfloat16) on ``device``: what each backend says, and the choice."""
    spec = LayerSpec(8, 128, 128, torch.bfloat16, device or torch.device("cpu"))
    chosen = select(spec, block_size)
    lines = []
    for backend in backends().values():
        reason = backend.unavailable() or backend.unsupported(spec, block_size)
        lines.append(BackendReport(backend.name, reason is None, backend is chosen, reason or "ready"))
    return lines
