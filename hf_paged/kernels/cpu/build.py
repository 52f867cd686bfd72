"""Compiles the CPU kernels into one shared library next to their sources.

It owns compiler flags and nothing else; it imports neither torch nor the rest of the package, so that ``setup.py`` can
load it by path at install time. By hand: ``python -m hf_paged.kernels.cpu.build``.

The library is not linked against an OpenMP runtime on purpose. Torch brings its own (under names that differ between
wheels), and a second one in the process would mean two thread pools on the same cores; native.py makes torch's symbols
visible before it loads the library.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent
LIBRARY_NAME = "_hfpaged_cpu.so"

_COMMON = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
_WARN = ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-psabi", "-Wno-ignored-attributes"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
_X86_FLAGS: dict[str, list[str]] = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": [*_AVX512, "-mavx512bf16", "-mavx512vnni"],
    "amx": [*_AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}
#: sources that are compiled once for each instruction set
_PER_ISA = ("attend", "decoder")


class BuildError(Exception):
    """The kernels cannot be compiled here; the message says why."""


def _compiler() -> list[str]:
    chosen = os.environ.get("CXX")
    if chosen:
        return shlex.split(chosen)
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler found (looked for $CXX, g++, c++, clang++)")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{done.stderr.strip()}")


def _accepts(compiler: list[str], flags: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cpp"
        probe.write_text("int probe() { return 0; }\n", encoding="utf-8")
        try:
            _run([*compiler, *flags, "-c", str(probe), "-o", str(Path(folder) / "probe.o")])
        except BuildError:
            return False
    return True


def build(target: Path | None = None) -> Path:
    """Compile to ``target`` (default: beside the sources) and return its path. Raises BuildError."""
    target = target or SOURCE_DIR / LIBRARY_NAME
    if os.name != "posix":
        raise BuildError("the CPU kernels are built for Linux and macOS only")
    compiler = _compiler()
    flags = [*_COMMON, *_WARN]
    if _accepts(compiler, ["-fopenmp"]):
        flags.append("-fopenmp")
    levels: dict[str, list[str]] = {"portable": []}
    if platform.machine().lower() in ("x86_64", "amd64"):
        flags.append("-DHFP_X86")
        levels.update(_X86_FLAGS)
    units = {f"{name}_{isa}.cpp": extra for name in _PER_ISA for isa, extra in levels.items()}
    units["common.cpp"] = []
    with tempfile.TemporaryDirectory() as folder:
        objects = [str(Path(folder) / f"{Path(name).stem}.o") for name in units]
        commands = [
            [*compiler, *flags, *extra, "-c", str(SOURCE_DIR / name), "-o", output]
            for (name, extra), output in zip(units.items(), objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        # Linked without -fopenmp: see the module docstring. macOS must be told that symbols may be missing.
        undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        linked = str(Path(folder) / LIBRARY_NAME)
        _run([*compiler, "-shared", "-fPIC", *undefined, *objects, "-o", linked])
        target.parent.mkdir(parents=True, exist_ok=True)
        # Never write into a library that a running process has mapped: replace it.
        staged = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(linked, staged)
        staged.chmod(0o755)
        os.replace(staged, target)
    return target


def main() -> int:
    try:
        sys.stdout.write(f"{build()}\n")
    except BuildError as error:
        sys.stderr.write(f"hf_paged: the CPU kernels were not built: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
