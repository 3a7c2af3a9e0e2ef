"""Compiles kvstore/native/kernel.c into kvstore/native/_kernel.so, if there is a compiler.

Runs when the package is built or installed (a build hook of hatchling), or by hand: ``python scripts/build_kernel.py``. ``CC``
names the compiler. Without one, or if it fails, the package works with its kernel in Python and reports that.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE = REPOSITORY / "kvstore" / "native" / "kernel.c"
LIBRARY = SOURCE.with_name("_kernel.so")
NO_COMPILER = "no C compiler here"
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-pthread", "-s")


def compiler() -> list[str] | None:
    """Return the command of the C compiler, or None."""
    named = os.environ.get("CC")
    if named is not None:
        return shlex.split(named) or None
    return next(([found] for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def build(library: Path = LIBRARY, extra: tuple[str, ...] = ()) -> str:
    """Compile the kernel. Return an empty text, or why there is none."""
    command = compiler()
    if command is None:
        return NO_COMPILER
    made = library.with_suffix(f".{os.getpid()}")
    try:
        done = subprocess.run(
            [*command, *FLAGS, *extra, "-o", str(made), str(SOURCE)], capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            return f"{command[0]} failed: {done.stderr.strip()[:2000]}"
        made.replace(library)  # a process that has the old one mapped keeps it
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} failed: {error}"
    finally:
        made.unlink(missing_ok=True)
    return ""


def main() -> None:
    """Compile the kernel and report."""
    reason = build()
    print(reason or f"made {LIBRARY.relative_to(REPOSITORY)}")
    sys.exit(bool(reason))


if __name__ == "__main__":
    main()
