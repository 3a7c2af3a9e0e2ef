"""Identifies the weights of adapters by their files, since keys are made before vLLM reads an adapter.

vLLM reads an adapter's files when a request first needs it or when it is added, and again after each eviction among other
adapters. So the engine certainly holds the weights in a folder as long as its files are those from before the first read: each
check compares their identity (inode, size, times). If the identity changes, the engine may hold either version, and its prefix
cache KV of both. From then on, until the engine restarts, requests of the adapter are neither loaded nor stored. A store checks
again after the step that computed its blocks.

vLLM can also replace an adapter from another folder, while requests of the old one run (``load_inplace``). They go on with the
new weights, so nothing more of them is stored, and the old folder is not known any more.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

from kvclient.engines.model_files import sampled_digest
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.identity.adapter_mixing import AdapterMixing
from kvstore.observe.limited_log import LimitedLog

_log = logging.getLogger(__name__)
_limited = LimitedLog(_log)
_CONFIG = "adapter_config.json"
"""Holds what the weights are multiplied with."""
_MOST_CONFIG_BYTES = 1 << 20
_MOST_FILES = 1_024
_MOST_ADAPTERS = 4_096
"""More are not kept apart, and so not shared."""
_WATCHED = "_kvstore_watched"

Files = tuple[tuple[str, int, int, int, int], ...]
"""By file: name, inode, size, times of the last change of its bytes and of its status. The latter cannot be set back."""


class Adapter(Protocol):
    """The fields of vLLM's ``LoRARequest`` that are used here."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """The weights of one adapter.

    Attributes:
        path: their folder.
        files: that were read.
        digest: of their content.
    """

    path: str
    files: Files
    digest: str

    def unchanged(self) -> bool:
        """Whether the files are still those that were read. Takes a few microseconds per file."""
        try:
            return _files(self.path) == self.files
        except OSError:
            return False


class Adapters:
    """The adapters of one engine. Thread-safe.

    Args:
        counters: count requests whose adapter is not identified.
    """

    def __init__(self, counters: ConnectorCounters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._known: dict[int | str, AdapterWeights | None] = {}
        """By vLLM's number, which names its weights, and by path, which with the name names KV in vLLM's prefix cache."""
        self._replacing: set[int] = set()
        """Numbers whose adapters the engine is replacing."""
        self.mixing = AdapterMixing()
        self.blind = False
        """Whether adapters may be added to the engine without being seen here: then none is shared."""
        self.target_modules: tuple[str, ...] = ()
        """The only modules of the model to which vLLM applies adapters; empty: all."""

    def weights(self, adapter: Adapter | Any) -> AdapterWeights | None:  # noqa: ANN401
        """Return the weights that this engine certainly holds for an adapter; None: unknown."""
        number, path = int(adapter.lora_int_id), str(adapter.lora_path)
        with self._lock:
            if number not in self._known or path not in self._known:
                if len(self._known) >= 2 * _MOST_ADAPTERS:
                    self._distrust(number, path)
                    _limited.warning(
                        "too many adapters: %s (most=%d); its requests are neither loaded nor stored", path, _MOST_ADAPTERS
                    )
                    return None
                read = self._known[path] if path in self._known else self._read(path)
                self._known.setdefault(path, read)
                self._known.setdefault(number, read)
            weights, same = self._known[number], self._known[path]
            if weights is not None and weights is same and not self.blind and weights.unchanged():
                return weights
            if weights is None and number not in self._replacing:
                self._distrust(number, path)
            if weights is None or same is None:
                return None
            self._distrust(number, path)
            if getattr(adapter, "load_inplace", False):  # running requests of the old folder go on with the new weights
                self._known[weights.path] = None
        _log.warning("adapter files changed: %s (path=%s); its requests are neither loaded nor stored", adapter.lora_name, path)
        return None

    def _read(self, path: str) -> AdapterWeights | None:
        """Identify the part of an adapter that the engine applies; None: not possible."""
        read = _read(path)
        if read is None or not self.target_modules:
            return read
        return replace(read, digest=f"{read.digest}:{','.join(sorted(self.target_modules))}")

    def _distrust(self, number: int, path: str) -> None:
        """Forget the weights of a number, and those of a folder: vLLM's prefix cache may have KV of others under its path."""
        for one in (number, path):
            if one in self._known:
                self._known[one] = None

    @property
    def known(self) -> int:
        """How many numbers and folders are remembered."""
        return len(self._known)

    def holds(self, adapter: Adapter | Any, weights: AdapterWeights) -> bool:  # noqa: ANN401
        """Whether the engine computes requests of an adapter with these weights, which ``weights`` has returned for it."""
        with self._lock:
            return self._known.get(int(adapter.lora_int_id)) is weights and self._known.get(str(adapter.lora_path)) is weights

    def computes_as_keyed(self, adapter: Adapter | Any, weights: AdapterWeights | None) -> bool:  # noqa: ANN401
        """Whether the engine certainly computes a request with these weights, or (None) with no adapter's weights."""
        return not self.mixing.happened if weights is None else self.holds(adapter, weights)

    def begin_replacement(self, adapter: Adapter | Any) -> AdapterWeights | None:  # noqa: ANN401
        """Handle that the engine is about to read an adapter in place of the one with its number.

        Requests of the old one go on with the new weights. What they compute is in the engine's prefix cache under the old path,
        which is therefore not known any more.

        Returns:
            The weights in the new folder; None: unknown.
        """
        number, path = int(adapter.lora_int_id), str(adapter.lora_path)
        with self._lock:
            if path not in self._known and len(self._known) < 2 * _MOST_ADAPTERS:
                self._known[path] = self._read(path)
            old, new = self._known.get(number), self._known.get(path)
            if new is not None and not new.unchanged():
                new = self._known[path] = None
            if old is not None and old is not new:
                self._known[old.path] = None
            if number in self._known or len(self._known) < 2 * _MOST_ADAPTERS:
                self._known[number] = None
                self._replacing.add(number)
        return new

    def end_replacement(self, adapter: Adapter | Any, weights: AdapterWeights | None) -> None:  # noqa: ANN401
        """Handle that the engine has read an adapter.

        Args:
            adapter: the adapter.
            weights: from ``begin_replacement``; None: they are unknown, or the engine did not read them.
        """
        number = int(adapter.lora_int_id)
        with self._lock:
            if number in self._replacing and weights is not None and weights.unchanged():
                self._known[number] = weights
            self._replacing.discard(number)

    def of_request(self, adapter: Adapter | Any) -> AdapterWeights | None:  # noqa: ANN401
        """Return the weights for a request and count it if they are unknown."""
        weights = self.weights(adapter)
        if weights is None:
            self._counters.add("adapters_unknown")
        return weights

    def watch(self) -> None:
        """Sees from now on which adapters are added to the engine of this process, before it reads them."""
        _watching.add(self)
        self.blind = not _watch_engine()
        if self.blind:
            _log.warning("this vLLM does not show which adapters are added to it: requests with adapters are not shared")


def _read(path: str) -> AdapterWeights | None:
    """Identify the weights in an adapter's folder; None: not possible."""
    try:
        before = _files(path)
        digest = sampled_digest(Path(path)) if before else ""
        if not digest:
            _log.warning(
                "adapter not identified: %s: not a local folder with weights; its requests are neither loaded nor stored", path
            )
            return None
        with (Path(path) / _CONFIG).open("rb") as file:
            config = hashlib.sha256(file.read(_MOST_CONFIG_BYTES)).hexdigest()[:16]
        read = AdapterWeights(path, before, f"{digest}:{config}")
    except OSError as error:
        _log.warning("adapter not identified: %s (error=%s); its requests are neither loaded nor stored", path, error)
        return None
    return read if read.unchanged() else None


def _files(path: str) -> Files:
    """The files in a folder, by name; empty: there is none.

    Raises:
        OSError: they cannot be looked at, or are far too many.
    """
    folder = Path(path)
    if not folder.is_dir():
        return ()
    found: list[tuple[str, int, int, int, int]] = []
    for one in sorted(folder.iterdir()):
        if len(found) >= _MOST_FILES:
            raise OSError(f"more than {_MOST_FILES} files")
        at = one.stat()
        found.append((one.name, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns))
    return tuple(found)


_watching: weakref.WeakSet[Adapters] = weakref.WeakSet()


def _watch_engine() -> bool:
    """Patch vLLM's engine core to report each adapter that is added, once per process. False: this vLLM cannot be patched."""
    try:
        from vllm.v1.engine.core import EngineCore

        original = EngineCore.add_lora
    except (ImportError, AttributeError):
        return False
    if not getattr(original, _WATCHED, False):
        EngineCore.add_lora = _telling(original)
    return True


def _telling(original: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    @wraps(original)
    def add_lora(core: Any, lora_request: Any) -> bool:  # noqa: ANN401  # vLLM's own
        watching = list(_watching)
        if not getattr(lora_request, "load_inplace", False):
            for adapters in watching:
                adapters.weights(lora_request)
            return original(core, lora_request)
        before = [adapters.begin_replacement(lora_request) for adapters in watching]
        added = False
        try:
            added = original(core, lora_request)
        finally:
            for adapters, weights in zip(watching, before, strict=True):
                adapters.end_replacement(lora_request, weights if added else None)
        return added

    setattr(add_lora, _WATCHED, True)
    return add_lora
