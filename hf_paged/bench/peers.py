"""Which peers there are, and how the process of each is started.

A peer is an adapter, a module or script that calls ``hf_paged_peer.serve``, and a Python to run it with. hf_paged and
stock transformers run in this Python. Other engines are files ``NAME_peer.py`` of one folder; the Python of each is
``NAME/bin/python`` in the folder of environments, which ``make bench-peers`` fills. Knows nothing of what they do.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import hf_paged
from hf_paged.bench import wire
from hf_paged.errors import ConfigError

#: agreement is against this one in fp32
REFERENCE = "stock"
#: adapters and what they are told
_BUILTIN: dict[str, tuple[str, ...]] = {
    "hf-paged": ("hf_paged_llm",),
    "hf-paged-int8": ("hf_paged_llm", "int8_dynamic"),
    "hf-paged-int8-weights": ("hf_paged_llm", "int8_weight_only"),
    "hf-paged-generate": ("hf_paged_generate",),
    REFERENCE: ("stock_generate",),
    "stock-batch": ("stock_generate_batch",),
}
#: what the extra packages of some are called, and how to get them
_NEEDS = {name: ("torchao", "pip install 'hf-paged[quantization]'") for name in _BUILTIN if "int8" in name}
_OURS = "hf-paged"
_SUFFIX = "_peer.py"
_ROOT = Path(hf_paged.__file__).resolve().parent.parent
#: where a source checkout has other engines' adapters and environments
ADAPTERS, ENVIRONMENTS = _ROOT / "benchmarks" / "peers", _ROOT / ".peers"


@dataclass(frozen=True)
class PeerSpec:
    """How to start a peer. ``missing`` says what to do where it is not installed; it then has no use otherwise."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""


def builtin(name: str) -> PeerSpec:
    """A peer that runs in this Python."""
    package, how = _NEEDS.get(name, ("", ""))
    missing = f"not installed: {how}" if package and importlib.util.find_spec(package) is None else ""
    return _module(name, *_BUILTIN[name], missing=missing)


def machine() -> PeerSpec:
    """Not an engine: the process that measures matrix products and memory, for the floor."""
    return _module("machine", "machine_rates")


def available(adapters: Path = ADAPTERS, environments: Path = ENVIRONMENTS) -> dict[str, PeerSpec]:
    """Every peer by name, ours first, with those that would have to be installed."""
    found = {name: builtin(name) for name in _BUILTIN}
    for script in sorted(adapters.glob(f"*{_SUFFIX}")):
        name = script.name.removesuffix(_SUFFIX).replace("_", "-")
        python = environments / script.name.removesuffix(_SUFFIX) / "bin" / "python"
        missing = "" if python.is_file() else "not installed: make bench-peers"
        found[name] = PeerSpec(name, (str(python), str(script)), {"PYTHONPATH": _wire_folder()}, missing)
    return found


def choose(names: Sequence[str] | None, known: Mapping[str, PeerSpec]) -> list[PeerSpec]:
    """The peers of these names, in the order of ``known``; all for None.

    Raises ConfigError for a name that is not known.
    """
    for name in names or ():
        if name not in known:
            raise ConfigError(f"no peer {name!r}; there are {', '.join(known)}")
    return [spec for name, spec in known.items() if names is None or name in names]


def baseline(names: Sequence[str]) -> str | None:
    """The peer that ratios are for: hf_paged's engine, or its generate(), if there is one."""
    return next((name for name in (_OURS, "hf-paged-generate") if name in names), None)


def thread_variables(threads: int) -> dict[str, str]:
    """What libraries look at before they can be told. How their threads wait is left to each engine."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**dict.fromkeys(names, str(threads)), "TOKENIZERS_PARALLELISM": "false"}


def _module(name: str, module: str, *args: str, missing: str = "") -> PeerSpec:
    # the package may be used from a checkout that is not installed
    paths = [str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    command = (sys.executable, "-m", f"hf_paged.bench.adapters.{module}", *args)
    return PeerSpec(name, command, {"PYTHONPATH": os.pathsep.join(paths)}, missing)


def _wire_folder() -> str:
    return str(Path(wire.__file__).resolve().parent)
