"""Make torchvision's build for CUDA importable beside torch's build for CPUs.

Package indexes offer torchvision only as a build for CUDA. Its compiled operators do not load here, and then its import fails,
because it registers a shape function for one of them. vLLM needs the import for models with images, not the operators. This
script declares the two operators at the beginning of the module that fails. It does nothing if torchvision can be imported.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

_DECLARED = """import torch.library

# Declared by scripts/stub_torchvision.py of kvstore: torchvision's own operators do not load beside torch's build for CPUs.
_declared = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    """Change torchvision's module, if its import fails without the change."""
    if not (error := _import_error()):
        return
    module = Path(sysconfig.get_path("purelib")) / "torchvision" / "_meta_registrations.py"
    if not module.exists():
        raise SystemExit("torchvision is not installed in this environment")
    found = module.read_text()
    if not found.startswith(_DECLARED):
        module.write_text(_DECLARED + found)
        error = _import_error()
    if error:
        module.write_text(found.removeprefix(_DECLARED))
        raise SystemExit(f"torchvision cannot be imported, also with its operators declared: {error}")


def _import_error() -> str:
    """Return the last line of what an import of torchvision prints; empty: it works."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import torchvision"], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2]


if __name__ == "__main__":
    main()
