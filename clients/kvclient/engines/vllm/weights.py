"""Which weights a folder holds, found out cheaply: a copy on another host has the same digest, another fine-tune another.

Small sets (adapters) are read whole. Of others: sizes, the beginning of each file and 256 samples of it, evenly spread; and where
the file says where its tensors lie (safetensors), a sample of every tensor, the small ones whole: a training step of norms alone
shows. Whoever changes a few numbers of a large tensor in place, and nothing else, says so by ``weights_epoch``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_WHOLE_BYTES = 64 << 20
_HEAD_BYTES = 1 << 20
_SAMPLE_BYTES = 4096
_SAMPLES = 256
_MOST_HEADER_BYTES = 100 << 20
"""What the format itself allows."""
_MOST_ADAPTERS = 4096


class Adapter(Protocol):
    """What of vLLM's ``LoRARequest`` is used here."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool


def sampled_digest(folder: Path) -> str:
    """A digest of the weights in a folder, or of one file; empty where there are none (a name of a hub, say).

    Raises:
        OSError: a file cannot be read.
    """
    files = [folder] if folder.is_file() else sorted(path for path in folder.glob("*") if path.suffix in _SUFFIXES)
    whole = sum(path.stat().st_size for path in files) <= _WHOLE_BYTES
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name}:{size}:".encode())
            if whole:
                while piece := file.read(_HEAD_BYTES):
                    digest.update(piece)
                continue
            digest.update(file.read(_HEAD_BYTES))
            for sample in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
            for start, length in _tensors(file, size) if path.suffix == ".safetensors" else ():
                file.seek(start + max(0, length - _SAMPLE_BYTES) // 2)
                digest.update(file.read(min(length, _SAMPLE_BYTES)))
    return digest.hexdigest()[:16] if files else ""


def _tensors(file: IO[bytes], size: int) -> Iterator[tuple[int, int]]:
    """Where the tensors of a safetensors file lie: start and length in bytes; none where it does not say so sensibly."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > min(size, _MOST_HEADER_BYTES):
        return
    try:
        header = json.loads(file.read(length))
        places = sorted(tuple(one["data_offsets"]) for name, one in header.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, AttributeError):
        return
    for place in places:
        if len(place) == 2 and all(isinstance(at, int) for at in place) and 0 <= place[0] <= place[1] <= size - 8 - length:
            yield 8 + length + place[0], place[1] - place[0]


_adapters: dict[tuple[int, str], str] = {}


def adapter_digest(adapter: Adapter | Any) -> str | None:  # noqa: ANN401
    """Which weights an adapter has in this engine: read when it is first asked for, and again where it is loaded in place.

    vLLM loads an adapter once for each of its numbers, so that a folder that changes meanwhile does not change the engine.

    Returns:
        Empty for a name of a hub; None where the files cannot be read: nothing of such a request may be shared.
    """
    identity = (adapter.lora_int_id, adapter.lora_path)
    if identity not in _adapters or getattr(adapter, "load_inplace", False):
        if len(_adapters) >= _MOST_ADAPTERS:
            _adapters.clear()
        try:
            _adapters[identity] = sampled_digest(Path(adapter.lora_path))
        except OSError:
            return None
    return _adapters[identity]
