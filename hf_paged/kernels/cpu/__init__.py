"""Native CPU kernels: C++ behind a plain C ABI, compiled at install time, loaded with ctypes on first use.

Public here are ``checksums`` and ``unavailable``; attention goes through ``hf_paged.attention.backends.cpu_native``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["checksums", "unavailable"]

# Imports are deferred so that `python -m hf_paged.kernels.cpu.build` needs neither torch nor a built library.


def unavailable() -> str | None:
    """None when the kernels can be used in this process, else why not and how to get them."""
    from hf_paged.kernels.cpu import native

    return native.unavailable()


def checksums(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """A 64-bit digest of each tensor's bytes at about memory speed; None without the library or off the CPU."""
    from hf_paged.kernels.cpu import native

    return native.checksums(tensors)
