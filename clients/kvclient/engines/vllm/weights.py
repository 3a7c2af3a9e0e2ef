"""Which weights a folder holds, found out cheaply: a copy on another host has the same digest, another fine-tune another.

Sizes, the beginning of each file (where safetensors keep their names and shapes) and 256 samples of each file, evenly spread. A
training step changes every one of them; whoever changes a few tensors in place, and nothing else, says so by ``weights_epoch``.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_HEAD_BYTES = 1 << 20
_SAMPLE_BYTES = 4096
_SAMPLES = 256


def sampled_digest(folder: Path) -> str:
    """A digest of the weights in a folder, or of one file; empty where there are none (a name of a hub, say).

    Raises:
        OSError: a file cannot be read.
    """
    files = [folder] if folder.is_file() else sorted(path for path in folder.glob("*") if path.suffix in _SUFFIXES)
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name}:{size}:".encode())
            digest.update(file.read(_HEAD_BYTES))
            for sample in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16] if files else ""
