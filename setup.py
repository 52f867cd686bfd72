"""Adds the CPU kernels to what pyproject.toml declares.

The library is plain C++ behind a C ABI, without Python or torch headers, so one wheel serves every Python 3. It is an
optional extension: where it cannot be compiled the package installs all the same, says so once, and the "cpu" attention
backend reports how to get it. ``HF_PAGED_SKIP_NATIVE=1`` leaves it out on purpose.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

KERNELS = Path("hf_paged/kernels/cpu")
NAME = "hf_paged.kernels.cpu._hfpaged_cpu"


def load_build_module() -> ModuleType:
    # By path: importing the package would need torch, which is not there in an isolated build.
    spec = importlib.util.spec_from_file_location("_hfpaged_cpu_build", Path(__file__).parent / KERNELS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildKernels(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        # No interpreter tag: ctypes loads it, not the import system.
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        builder = load_build_module()
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        try:
            if os.environ.get("HF_PAGED_SKIP_NATIVE", "0") not in ("", "0"):
                raise builder.BuildError("HF_PAGED_SKIP_NATIVE is set")
            builder.build(target)
        except builder.BuildError as error:
            if not self.inplace:
                target.unlink(missing_ok=True)  # of an earlier build, perhaps from other sources
            self.warn(
                f"the native CPU kernels of hf_paged were not built ({error}). The package works without them, with "
                "slower attention on CPU. To add them later: install a C++ compiler and run "
                "`python -m hf_paged.kernels.cpu.build`."
            )


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(
    ext_modules=[Extension(NAME, sources=[str(path) for path in sorted(KERNELS.glob("*.cpp"))], optional=True)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
