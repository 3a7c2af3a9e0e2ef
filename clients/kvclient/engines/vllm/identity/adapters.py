"""Which weights the adapters of this engine have, as certain as can be: vLLM says no more than where their files lie.

vLLM reads an adapter's files when a request first needs it, or when somebody adds it, and again whenever it was evicted among
other adapters meanwhile. So an engine is certain to have what lies in a folder as long as the files there are those that were
there before it could have read any: from the first sight on, each look compares their identity (inode, size, times). Once it is
another, the engine may have the one or the other, and its own prefix cache may hold KV of both: from then on, until the engine is
started anew, its requests are neither loaded nor stored. A store looks once more after the step that computed its blocks.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

from kvclient.engines.model_files import sampled_digest
from kvclient.engines.vllm.counters import ConnectorCounters

_log = logging.getLogger(__name__)
_CONFIG = "adapter_config.json"
"""Holds what the weights are multiplied with."""
_MOST_CONFIG_BYTES = 1 << 20
_MOST_FILES = 1_024
_MOST_ADAPTERS = 4_096
"""More are not kept apart, and so not shared."""
_WATCHED = "_kvstore_watched"

Files = tuple[tuple[str, int, int, int, int], ...]
"""By file: name, inode, size, times of the last change of its bytes and of itself, which nobody can set back."""


class Adapter(Protocol):
    """What of vLLM's ``LoRARequest`` is used here."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """The weights of one adapter.

    Attributes:
        path: their folder.
        files: that were read.
        digest: of what they hold.
    """

    path: str
    files: Files
    digest: str

    def unchanged(self) -> bool:
        """Whether the files are still those that were read. Some microseconds a file."""
        try:
            return _files(self.path) == self.files
        except OSError:
            return False


class Adapters:
    """The adapters of one engine. Thread-safe.

    Args:
        counters: where requests are counted that nothing can be said about.
    """

    def __init__(self, counters: ConnectorCounters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._known: dict[int | str, AdapterWeights | None] = {}
        """By vLLM's number, which names its weights, and by path, which with the name names KV in vLLM's prefix cache."""
        self.blind = False
        """Whether adapters may be added to the engine without being seen here: then none is shared."""

    def weights(self, adapter: Adapter | Any) -> AdapterWeights | None:  # noqa: ANN401
        """The weights that an adapter is certain to have in this engine; None: nobody knows."""
        number, path = int(adapter.lora_int_id), str(adapter.lora_path)
        with self._lock:
            if number not in self._known or path not in self._known:
                if len(self._known) >= 2 * _MOST_ADAPTERS:
                    return None
                read = self._known[path] if path in self._known else _read(path)
                self._known.setdefault(path, read)
                self._known.setdefault(number, read)
            weights, same = self._known[number], self._known[path]
            if weights is None or same is None:
                return None
            if weights is same and not self.blind and weights.unchanged():
                return weights
            self._known[number] = self._known[path] = None
        _log.warning("adapter %s (%s): its files are others than at first: neither loaded nor stored", adapter.lora_name, path)
        return None

    def of_request(self, adapter: Adapter | Any) -> AdapterWeights | None:  # noqa: ANN401
        """The same for a request, which is counted where nobody knows."""
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
    """What lies in an adapter's folder; None: nothing that can be told from others."""
    try:
        before = _files(path)
        digest = sampled_digest(Path(path)) if before else ""
        if not digest:
            _log.warning("adapter %s is no folder with weights on this host: its requests are neither loaded nor stored", path)
            return None
        with (Path(path) / _CONFIG).open("rb") as file:
            config = hashlib.sha256(file.read(_MOST_CONFIG_BYTES)).hexdigest()[:16]
        read = AdapterWeights(path, before, f"{digest}:{config}")
    except OSError as error:
        _log.warning("adapter %s cannot be read (%s): its requests are neither loaded nor stored", path, error)
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
    """Lets vLLM's engine core tell of each adapter that is added to it, once a process; whether that is possible."""
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
        for adapters in list(_watching):
            adapters.weights(lora_request)
        return original(core, lora_request)

    setattr(add_lora, _WATCHED, True)
    return add_lora
