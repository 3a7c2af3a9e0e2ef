"""SGLang's tests, in a process of their own: SGLang patches transformers, and stand-ins for GPU kernels would mislead vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

FOLDER = Path(__file__).parent / "sglang"


@pytest.mark.slow
@pytest.mark.timeout(960)  # of all of them; each has its own
def test_alone() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=10", str(FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    print(done.stdout[-8000:], done.stderr[-4000:])
    assert done.returncode == 0, "see above"
