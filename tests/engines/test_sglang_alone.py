"""SGLang's tests, in a process of their own: SGLang patches transformers, and stand-ins for GPU kernels would mislead vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

FOLDER = Path(__file__).parent / "sglang"


@pytest.mark.slow
@pytest.mark.timeout(660)  # of a whole module; each of its tests has its own
@pytest.mark.parametrize("module", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_alone(module: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / module)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    print(done.stdout[-8000:], done.stderr[-4000:])
    assert done.returncode == 0, f"{module}: see above"
