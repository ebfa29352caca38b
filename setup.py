"""Compiles the optional CPU kernels; everything else about the package is in pyproject.toml.

They are a plain shared library with a C ABI, loaded with ctypes: neither Python's headers nor torch are needed.
Without a C++ compiler the build succeeds and the package simply lacks them. Each instruction set has a
translation unit of its own, compiled for it and chosen at run time, so a build fits every processor.
"""

from __future__ import annotations

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("kernels/cpu")
COMMON_FLAGS = (
    *("-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-pthread", "-w", "-g0"),
    # One rounding per operation as written, in every copy of a loop: results do not depend on the batch.
    *("-ffp-contract=off", "-fno-math-errno"),
)
AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma")
BF16_SOURCE = "step_avx512_bf16.cpp"
ISA_FLAGS = {
    "step_avx2.cpp": ("-mavx2", "-mfma"),
    "step_avx512.cpp": AVX512_FLAGS,
    BF16_SOURCE: (*AVX512_FLAGS, "-mavx512bf16"),
}
IS_X86 = platform.machine().lower() in {"x86_64", "amd64"}


class BuildKernels(build_ext):
    """Compiles every source with its own flags and links one library without an init function."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link `ext`; failures are reported and forgiven by the base class (the extension is optional)."""
        objects, macros = [], []
        # This one comes first: without a compiler that knows its instructions, the others are built without it.
        for source in sorted(ext.sources, key=lambda path: Path(path).name != BF16_SOURCE):
            name = Path(source).name
            flags = ISA_FLAGS.get(name, ()) if IS_X86 else ()
            try:
                objects += self.compiler.compile(
                    [source],
                    output_dir=self.build_temp,
                    macros=macros,
                    extra_postargs=[*COMMON_FLAGS, *flags],
                    depends=ext.depends,
                )
            except CompileError:
                if name != BF16_SOURCE:
                    raise
                self.warn("this compiler knows no AVX512-BF16: bf16 weights will be widened instead")
            else:
                macros += [("PDS_HAS_AVX512_BF16", None)] if name == BF16_SOURCE else []
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), extra_postargs=["-pthread"], target_lang="c++"
        )


setup(
    ext_modules=[
        Extension(
            "pdserve.kernels._cpu_kernels",
            sources=sorted(str(path) for path in SOURCES.glob("*.cpp")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
