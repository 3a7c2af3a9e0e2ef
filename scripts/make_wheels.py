"""Builds wheels for x86-64 and aarch64, both with the compiled kernel, by the cross compiler of the package ziglang.

python scripts/make_wheels.py [--out dist]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
GLIBC = "2.17"
MACHINES = ("x86_64", "aarch64")
EXTRA = {"x86_64": " -mcpu=x86_64+evex512"}
"""Arguments by machine. Clang 18 requires evex512 for functions of AVX-512, and gcc 12 rejects that name in the source."""


def compiler(machine: str) -> str:
    """Return the command of the cross compiler, as ``CC``."""
    return f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{GLIBC}{EXTRA.get(machine, '')}"


def main() -> None:
    """Build all wheels. A target without a kernel is an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "dist", help="folder of the wheels (default: dist)")
    options = parser.parse_args()
    for machine in MACHINES:
        platform = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(options.out)],
            cwd=REPOSITORY,
            env=os.environ | {"CC": compiler(machine), "KVSTORE_WHEEL_PLATFORM": platform},
            check=True,
        )


if __name__ == "__main__":
    main()
