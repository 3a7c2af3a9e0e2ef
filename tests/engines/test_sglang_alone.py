"""SGLang's tests, in a process of their own: SGLang patches transformers, and stand-ins for GPU kernels would mislead vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

FOLDER = Path(__file__).parent / "sglang"


@pytest.mark.slow
@pytest.mark.timeout(660)  # of all of them; each of its tests has its own
def test_alone(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """One process for all modules: it takes longer to import SGLang than most of them take."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'cases'}", str(FOLDER)]
    if pytestconfig.getoption("--thorough"):
        command.append("--thorough")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    print(done.stdout[-16_000:], done.stderr[-4_000:])
    assert done.returncode == 0, "see above"


def test_stubs_of_gpu_kernels_stay_in_other_processes() -> None:
    """In a process with vLLM they would stand for libraries that vLLM looks for."""
    assert not [finder for finder in sys.meta_path if type(finder).__module__ == "kvstore.lab.sglang_kernels"]
