"""A checkpoint is identified by all its bytes, because a sample does not cover them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvclient.engines.model_files import ModelFiles, sampled_digest, whole_digest

SIZE = 66 << 20
"""Above the size up to which samples cover everything."""
BETWEEN_SAMPLES = (SIZE // 255) * 100 + 8192
CLOCK_S = 0.3
"""Files that are newer than this when a process starts count as replaced."""
NEW_PROCESS = """
import sys
from kvclient.engines.model_files import ModelFiles
print(ModelFiles(sys.argv[1], *sys.argv[2:]).checkpoint_digest())
"""


def digest_of(model: Path, *more: str) -> str:
    """Identify a checkpoint in a process that starts after its files were written."""
    argv = [sys.executable, "-c", NEW_PROCESS, str(model), *more]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Create a model with one large file of zeros and a small one."""
    folder = tmp_path / "model"
    folder.mkdir()
    with (folder / "a.bin").open("wb") as file:
        file.truncate(SIZE)
    (folder / "b.safetensors").write_bytes(b"b")
    (folder / "quantize.json").write_text("{}")
    return folder


def test_checkpoint_one_changed_byte_gives_another_digest(model: Path) -> None:
    sampled, whole = sampled_digest(model), whole_digest(model)
    with (model / "a.bin").open("r+b") as file:
        file.seek(BETWEEN_SAMPLES)
        file.write(b"\1")
    assert sampled_digest(model) == sampled, "the samples do not see it"
    assert whole_digest(model) != whole


def test_checkpoint_names_sizes_and_lists_are_digested(model: Path) -> None:
    digests = [whole_digest(model)]
    (model / "quantize.json").write_text("{ }")
    digests.append(whole_digest(model))
    (model / "b.safetensors").rename(model / "c.safetensors")
    digests.append(whole_digest(model))
    (model / "c.safetensors").write_bytes(b"b\0")
    digests.append(whole_digest(model))
    assert len(set(digests)) == len(digests)
    assert whole_digest(model / "nothing") == ""


def test_checkpoint_is_identified_only_if_it_was_loaded(model: Path) -> None:
    time.sleep(CLOCK_S)
    known = digest_of(model)
    assert known.endswith(":")
    assert digest_of(model) == known
    assert digest_of(model, "dummy") == "", "weights that vLLM makes up"
    assert ModelFiles(str(model)).checkpoint_digest() == "", "files that are newer than this process"
    assert ModelFiles(str(model), elsewhere="bucket").checkpoint_digest() == ""
    assert ModelFiles(str(model), revision="commit").checkpoint_digest() == "commit:"
