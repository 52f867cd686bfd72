"""The public surface: what is exported, that all of it resolves, and what importing the package costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_paged

PUBLIC = {
    "AsyncLLM",
    "CacheConfig",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "EnginePausedError",
    "HfPagedError",
    "InternalError",
    "InvalidRequestError",
    "LLM",
    "OutOfBlocksError",
    "PagedCache",
    "RequestOutput",
    "SamplingParams",
    "UnknownOptionError",
    "UnsupportedError",
    "__version__",
    "cache_stats",
    "clear",
    "register",
    "unregister",
    "weights_changed",
}


def test_exported_members():
    assert set(hf_paged.__all__) == PUBLIC
    assert len(hf_paged.__all__) == len(PUBLIC)
    assert set(dir(hf_paged)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_exported_name_resolves(name):
    assert getattr(hf_paged, name) is not None


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'pagedcache'"):
        hf_paged.pagedcache  # noqa: B018


def test_type_checkers_see_the_names_that_run_time_sees():
    """The TYPE_CHECKING block and the table of lazy names are two lists of the same thing."""
    tree = ast.parse(Path(hf_paged.__file__).read_text())
    seen = {
        (alias.asname, node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("hf_paged")
        for alias in node.names
    }
    assert seen == set(hf_paged._HOME.items())


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module", ["hf_paged", "hf_paged.errors", "hf_paged.config", "hf_paged.cache.manager", "hf_paged.cache.radix_tree"]
)
def test_import_does_not_load_torch(module):
    """These layers are plain Python: tests of them take milliseconds."""
    assert run_python(f"import sys, {module}; print('torch' in sys.modules, 'transformers' in sys.modules)") == (
        "False False\n"
    )


def test_core_needs_only_torch_and_transformers():
    """No optional library is loaded, even if installed, until the part that needs it is used. (transformers itself may
    bring typer and rich, so those are looked for before it is imported.)"""
    code = (
        "import sys, hf_paged, hf_paged.cli\n"
        "print(sorted({'rich', 'typer', 'tqdm', 'torch', 'transformers'} & set(sys.modules)))\n"
        "hf_paged.register(); hf_paged.unregister()\n"
        "optional = {'gguf', 'fastapi', 'uvicorn', 'grpc', 'ray', 'xgrammar', 'peft', 'flash_attn'}\n"
        "print(sorted(optional & set(sys.modules)))\n"
    )
    assert run_python(code) == "[]\n[]\n"
