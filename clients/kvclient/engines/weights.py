"""Which weights an engine has, found out cheaply: a copy on another host has the same digest, another fine-tune another.

Small sets (adapters) are read whole, and so are the lists that say which files hold which tensors, how they are quantized and how
images are prepared, and a model's own code. Of others: sizes, the beginning of each file and 256 samples of it, evenly spread;
and where the file says where its tensors lie (safetensors), a sample of every tensor, the small ones whole: a training step of
norms alone shows. Whoever changes a few numbers of a large tensor in place, and nothing else, says so by ``weights_epoch``.

Files say something of an engine's weights only where the engine has read them: weights made up (``dummy``), or brought by a
daemon, a server or a loader that nobody here knows, are nobody else's; nor are those whose files were put there since the engine
began to read, which may be others by now.
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

from kvclient.engines.stamps import put_there_since, reading_since_s

_log = logging.getLogger(__name__)
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_WHOLE_BYTES = 64 << 20
_HEAD_BYTES = 1 << 20
_SAMPLE_BYTES = 4096
_SAMPLES = 256
_MOST_HEADER_BYTES = 100 << 20
"""What the format itself allows."""
_PLAIN_FORMATS = {"auto", "safetensors"}
"""One and the same, safetensors where there are any; but where there are files of Mistral's format, too, ``auto`` reads those."""
_MISTRAL = "consolidated*.safetensors"
_FORMATS_OF_FILES = {
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
"""Ways of reading the weights that read the model's own files, each its own choice of them.

``npcache`` is none: it reads what it once made of them.
"""
_NOT_OF_THE_WEIGHTS = {
    "added_tokens.json",
    "chat_template.json",
    "config.json",  # as it is in force, it is looked at elsewhere
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
}
"""Of the lists beside the weights; whatever else is there may decide what is read of them, how, and what becomes of images."""
_LISTS = (".json", ".py")
"""Lists, and code that comes with a model and computes in place of the engine's."""
_MOST_LIST_BYTES = 64 << 20
_SNAPSHOTS, _COMMIT = "snapshots", re.compile(r"[0-9a-f]{40}")
"""How a hub's files lie: a folder a commit, which never changes, and a reference that does."""


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Where an engine's weights came from, as it says itself.

    Attributes:
        model: a folder, a file, or a name of a hub.
        load_format: the engine's name of the way.
        loader: what was said to the loader beside that; empty: nothing.
        revision: the commit of the hub, where the engine knows it.
        asked: the revision of the hub that was asked for; empty: the newest.
        elsewhere: where the weights are, if not where the model is.
        cache: the folder that the hub's files were fetched to; empty: the usual one.
    """

    model: str
    load_format: str = "auto"
    loader: str = ""
    revision: str = ""
    asked: str = ""
    elsewhere: str = ""
    cache: str = ""

    @property
    def way(self) -> str:
        """How they were read: weights of equal names that were read in other ways are other weights."""
        way = self.load_format.lower()
        if way in _PLAIN_FORMATS and not self.loader and (way == "auto" or not any(self.folder.glob(_MISTRAL))):
            return ""
        return f"{way}:{self.loader}"

    def digest(self, nobody_elses: Callable[[], str]) -> str:
        """What tells these weights from others.

        Args:
            nobody_elses: makes a text that no other engine has, for weights that cannot be told apart.

        Raises:
            OSError: a file cannot be read.
        """
        why = f"load format {self.load_format}"
        if self.load_format.lower() in _FORMATS_OF_FILES and not self.elsewhere:
            commit = self.revision or self._commit()
            found = commit or sampled_digest(self.folder)
            newer = None if commit else replaced(self.folder)
            if found and newer is None:
                return f"{found}:{self.way}"
            if found:
                why = f"{newer} was put there after this process began to read, which the next start mends"
        _log.warning(
            "the weights of %s cannot be told apart (%s): no KV is shared until weights_epoch names them", self.model, why
        )
        return f"{nobody_elses()}:{self.way}"

    def _commit(self) -> str:
        """The commit of the hub that was read; empty: none, or another one may have been read before what is there now came.

        Raises:
            OSError: the hub's files cannot be looked at.
        """
        folder = self.folder
        if Path(self.model).exists() or folder.parent.name != _SNAPSHOTS or not _COMMIT.fullmatch(folder.name):
            return ""
        reference = folder.parent.parent / "refs" / (self.asked or "main")
        alone = sum(1 for _ in folder.parent.iterdir()) == 1
        if (
            self.asked == folder.name
            or alone
            or (reference.is_file() and put_there_since([reference], reading_since_s()) is None)
        ):
            return folder.name
        return ""

    @property
    def folder(self) -> Path:
        """Where the model's files are: as named, or as they were fetched from a hub; one without files, where there are none."""
        if Path(self.model).exists():
            return Path(self.model)
        try:
            from huggingface_hub import try_to_load_from_cache  # comes with every engine

            found = try_to_load_from_cache(self.model, "config.json", cache_dir=self.cache or None, revision=self.asked or None)
        except (ImportError, ValueError):  # a path is no name of a hub
            found = None
        return Path(found).parent if isinstance(found, str) else Path(os.devnull)


def replaced(folder: Path) -> Path | None:
    """Something in a folder of weights, or above it, that may be another than this process has read; None: nothing is.

    Asked after the weights were looked at, so that nothing is missed that comes meanwhile.

    Raises:
        OSError: a file cannot be looked at.
    """
    if not folder.is_dir():
        return put_there_since([folder] if folder.is_file() else [], reading_since_s())
    read = sorted(path for path in folder.glob("*") if path.suffix in {*_SUFFIXES, *_LISTS})
    return put_there_since([folder, *read], reading_since_s())


def sampled_digest(folder: Path) -> str:
    """A digest of the weights in a folder and of the lists beside them, or of one file; empty where there are none.

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
    for path in sorted(folder.glob("*")) if files and folder.is_dir() else ():
        if path.suffix in _LISTS and path.name not in _NOT_OF_THE_WEIGHTS:
            with path.open("rb") as file:
                digest.update(f"{path.name}:".encode() + hashlib.sha256(file.read(_MOST_LIST_BYTES)).digest())
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
