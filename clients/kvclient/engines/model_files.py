"""Digests of a model's files: identify weights that an engine has not loaded yet or does not expose.

Adapters, lists (``*.json``) and code (``*.py``) are read whole. For large weight files the digest covers sizes, the beginning of
each file, 256 samples of 4 KiB, and a sample of every tensor of a safetensors file. A copy on another host has the same digest, a
fine-tune has another one. The digest may miss an in-place change of a few numbers of a large tensor: set ``weights_epoch`` then.

Files identify an engine's weights only if the engine has read them. Generated weights (``dummy``) and weights from a daemon, a
server or an unknown loader get a unique digest. So do files that were replaced after the engine may have begun to read them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvclient.engines.file_stamps import process_start_s, replaced_since

_log = logging.getLogger(__name__)
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_WHOLE_BYTES = 64 << 20
_HEAD_BYTES = 1 << 20
_SAMPLE_BYTES = 4096
_SAMPLES = 256
_MAX_HEADER_BYTES = 100 << 20
"""The limit of the safetensors format."""
_PLAIN_FORMATS = {"auto", "safetensors"}
"""The same loader if safetensors exist. If files in Mistral's format exist, ``auto`` reads those."""
_MISTRAL = "consolidated*.safetensors"
_FILE_FORMATS = {
    *_PLAIN_FORMATS,
    "bitsandbytes",
    "fastsafetensors",
    "gguf",
    "hf",
    "instanttensor",
    "mistral",
    "pt",
    "runai_streamer",
    "runai_streamer_sharded",
    "sharded_state",
}
"""Load formats that read the model's own files. ``npcache`` reads a cache that it made of them earlier."""
_IGNORED_LISTS = {
    "added_tokens.json",
    "chat_template.json",
    "config.json",  # hashed separately, with its current content
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
}
"""Lists that do not change KV. Any other may affect which weights are read, how they are read, and how images are prepared."""
_LISTS = (".json", ".py")
_MAX_LIST_BYTES = 64 << 20
_SNAPSHOTS, _COMMIT = "snapshots", re.compile(r"[0-9a-f]{40}")
"""Layout of a hub's cache: one immutable folder per commit, and mutable references."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The location from which an engine says that it loads its model.

    Attributes:
        model: a folder, a file, or a model name of a hub.
        load_format: the engine's name for its loader.
        loader: further options of the loader; empty: none.
        revision: commit of the hub, if the engine knows it.
        requested_revision: revision that the user asked for; empty: the newest.
        elsewhere: location of the weights, if it is not that of the model.
        cache: folder of the hub's downloaded files; empty: the default one.
    """

    model: str
    load_format: str = "auto"
    loader: str = ""
    revision: str = ""
    requested_revision: str = ""
    elsewhere: str = ""
    cache: str = ""

    @property
    def load_options(self) -> str:
        """Options that change how the weights are read; empty: defaults.

        Equal names with different load options do not share KV.
        """
        load_format = self.load_format.lower()
        plain = load_format in _PLAIN_FORMATS and not self.loader
        if plain and (load_format == "auto" or not any(self.folder.glob(_MISTRAL))):
            return ""
        return f"{load_format}:{self.loader}"

    def weights_digest(self, make_unique: Callable[[], str]) -> str:
        """Identify the weights, with the lists and the code beside them.

        Args:
            make_unique: returns a globally unique text, for weights that cannot be identified.

        Raises:
            OSError: a file cannot be read.
        """
        reason = f"load format {self.load_format}"
        if self.load_format.lower() in _FILE_FORMATS and not self.elsewhere:
            found, reason = self._identify(sampled_digest)
            if found:
                return f"{found}:{self.load_options}"
        _log.warning("weights not identified: no KV is shared unless weights_epoch names them (model=%s, %s)", self.model, reason)
        return f"{make_unique()}:{self.load_options}"

    def lists_digest(self, make_unique: Callable[[], str]) -> str:
        """Identify the lists and the code beside the weights; arguments and errors as of ``weights_digest``."""
        found, reason = self._identify(_lists_digest)
        if not found:
            _log.warning("model files not identified: no KV is shared without weights_epoch (model=%s, %s)", self.model, reason)
        return found or make_unique()

    def _identify(self, digest: Callable[[Path], str]) -> tuple[str, str]:
        """Return the commit or a digest of the folder, and the reason if it is empty."""
        if commit := self.revision or self._commit():
            return commit, ""
        found = digest(self.folder)
        newer = replaced_path(self.folder)
        if newer is None:
            return found, "no files"
        return "", f"replaced after the process started, until the next start: {newer}"

    def _commit(self) -> str:
        """Return the hub commit that was read; empty: none, or the engine may have read an older commit.

        Raises:
            OSError: the hub's files cannot be read.
        """
        folder = self.folder
        if Path(self.model).exists() or folder.parent.name != _SNAPSHOTS or not _COMMIT.fullmatch(folder.name):
            return ""
        reference = folder.parent.parent / "refs" / (self.requested_revision or "main")
        alone = sum(1 for _ in folder.parent.iterdir()) == 1
        if (
            self.requested_revision == folder.name
            or alone
            or (reference.is_file() and replaced_since([reference], process_start_s()) is None)
        ):
            return folder.name
        return ""

    @property
    def folder(self) -> Path:
        """Return the model's files: the given folder, or the hub's cache. A path without files if none exist."""
        if Path(self.model).exists():
            return Path(self.model)
        try:
            from huggingface_hub import try_to_load_from_cache  # every engine depends on it

            found = try_to_load_from_cache(
                self.model, "config.json", cache_dir=self.cache or None, revision=self.requested_revision or None
            )
        except (ImportError, ValueError):  # a path is not the name of a hub's model
            found = None
        return Path(found).parent if isinstance(found, str) else Path(os.devnull)


def replaced_path(folder: Path) -> Path | None:
    """Find an entry in a model's folder, or above it, that may have been replaced since this process read it.

    Call it after the digest, so that it also detects a replacement during the digest.

    Raises:
        OSError: a file cannot be examined.
    """
    if not folder.is_dir():
        return replaced_since([folder] if folder.is_file() else [], process_start_s())
    read = sorted(path for path in folder.glob("*") if path.suffix in {*_SUFFIXES, *_LISTS})
    return replaced_since([folder, *read], process_start_s())


def sampled_digest(folder: Path) -> str:
    """Digest the weights in a folder and the lists beside them, or one file; empty if none exist.

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
    if files:
        digest.update(_lists_digest(folder).encode())
    return digest.hexdigest()[:16] if files else ""


def _lists_digest(folder: Path) -> str:
    """Digest the lists and the code in a folder whole."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*")) if folder.is_dir() else ():
        if path.suffix in _LISTS and path.name not in _IGNORED_LISTS:
            with path.open("rb") as file:
                digest.update(f"{path.name}:".encode() + hashlib.sha256(file.read(_MAX_LIST_BYTES)).digest())
    return digest.hexdigest()[:16]


def _tensors(file: IO[bytes], size: int) -> Iterator[tuple[int, int]]:
    """Yield start and length of each tensor of a safetensors file, in bytes; nothing if its header is invalid."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > min(size, _MAX_HEADER_BYTES):
        return
    try:
        header = json.loads(file.read(length))
        offsets = sorted(tuple(one["data_offsets"]) for name, one in header.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, AttributeError):
        return
    for offset in offsets:
        if len(offset) == 2 and all(isinstance(at, int) for at in offset) and 0 <= offset[0] <= offset[1] <= size - 8 - length:
            yield 8 + length + offset[0], offset[1] - offset[0]
