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
TARGETS = {"x86_64": f"manylinux_{GLIBC.replace('.', '_')}_x86_64", "aarch64": f"manylinux_{GLIBC.replace('.', '_')}_aarch64"}


def main() -> None:
    """Build all wheels. A target without a kernel is an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "dist", help="folder of the wheels (default: dist)")
    options = parser.parse_args()
    for machine, platform in TARGETS.items():
        compiler = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{GLIBC}"
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(options.out)],
            cwd=REPOSITORY,
            env=os.environ | {"CC": compiler, "KVSTORE_WHEEL_PLATFORM": platform},
            check=True,
        )


if __name__ == "__main__":
    main()
