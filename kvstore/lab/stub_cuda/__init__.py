"""A stub of the CUDA driver, so that kvikio runs on machines without one. For tests, each in a separate process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_TIMEOUT_S = 60.0


def build_stub(folder: Path, *, with_device: bool = False) -> Path | None:
    """Compile the stub.

    Args:
        folder: target folder of ``libcuda.so.1``.
        with_device: provide a device whose memory is the process's own; else every call fails.

    Returns:
        The library; None: no C compiler was found.

    Raises:
        subprocess.SubprocessError: the compiler fails.
    """
    target = folder / "libcuda.so.1"
    arguments = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o", str(target), str(HERE / "stub.c"), "-lpthread"]
    for compiler in _COMPILERS:
        try:
            subprocess.run(
                [compiler, *(["-DWITH_DEVICE"] if with_device else []), *arguments],
                check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S,
            )  # fmt: skip
        except FileNotFoundError:
            continue
        return target
    return None


def with_stub(library: Path) -> dict[str, str]:
    """The environment of a process that is to find what ``build_stub`` made; ours is left as it is."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("KVIKIO_", "CUFILE_"))}
    return mine | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(library.parent), os.environ.get("LD_LIBRARY_PATH"))))}
