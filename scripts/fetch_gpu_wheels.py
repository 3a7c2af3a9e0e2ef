"""Download the wheels that ``make test-gpu`` and ``make bench-gpu`` need besides torch and NumPy, for a machine without internet.

    python3 scripts/fetch_gpu_wheels.py --python 3.12

Run it on a machine with internet, and copy the checkout with its folder ``gpu-wheels`` (about 16 MB) to the machine with the GPU.
The Makefile installs from that folder. ``--python`` is the version of the Python there whose torch has CUDA. One folder may hold
the wheels of several versions. Linux on x86-64 only.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parent.parent
_FETCH_S: Final = 600.0
_NEWEST_GLIBC: Final = 28
"""Of glibc 2.N: hosts with this one or a later one run the wheels. pip requires the name of each version."""


def download_command(python: str, folder: Path) -> Sequence[str]:
    """Return the command of pip that downloads the pinned wheels for one version of Python into a folder."""
    glibc = [f"manylinux_2_{minor}_x86_64" for minor in range(_NEWEST_GLIBC, 4, -1)]
    tags = [*glibc, "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *("--implementation", "cp", "--python-version", python, *(f"--platform={tag}" for tag in tags)),
        *("--requirement", str(REPOSITORY / "requirements-gpu.txt"), "--constraint", str(REPOSITORY / "constraints.txt")),
        *("--dest", str(folder)),
    ]


def main() -> None:
    """Download the wheels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument(
        "--python", default=here, metavar="3.N", help=f"version of the Python on the GPU machine (default {here})"
    )
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "gpu-wheels", help="destination (default gpu-wheels)")
    asked = parser.parse_args()
    if not re.fullmatch(r"3\.\d+", asked.python):
        parser.error(f"--python must be 3.N, not {asked.python}")
    subprocess.run(download_command(asked.python, asked.folder), check=True, timeout=_FETCH_S)
    wheels = list(asked.folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {size / 1e6:.0f} MB in {asked.folder}: copy them with the checkout to the GPU machine")


if __name__ == "__main__":
    main()
