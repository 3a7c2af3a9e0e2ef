"""Says why nothing is found if another number of tensor-parallel ranks stored a model's KV."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from kvclient import CacheSpec, KVClient, KVStoreError

_log = logging.getLogger(__name__)
_PAUSE_S: Final = 60.0
_TIMEOUT_S: Final = 1.0


def other_counts(known: Iterable[CacheSpec], own: CacheSpec) -> list[int]:
    """Return into how many parts other engines of the same model, tenant and kind divide their KV."""
    family = own.layout.partition(";")[0]
    return sorted(
        {
            spec.shard_count
            for spec in known
            if (spec.model, spec.tenant, spec.layout.partition(";")[0]) == (own.model, own.tenant, family)
        }
        - {own.shard_count}
    )


class OtherRanks:
    """Looks for engines of the same model with other tensor parallelism, at most once a minute. Thread-safe.

    Args:
        own: a namespace of this engine.
    """

    def __init__(self, own: CacheSpec) -> None:
        self._own = own
        self._lock = threading.Lock()
        self._next_s = 0.0
        self.told = False
        """Whether the line was logged."""

    @property
    def due(self) -> bool:
        """Whether to look now. True at most once a minute, and never after the line was logged."""
        with self._lock:
            now_s = time.monotonic()
            if self.told or now_s < self._next_s:
                return False
            self._next_s = now_s + _PAUSE_S
            return True

    def look(self, client: KVClient) -> None:
        """Ask the metadata server in a separate thread, so that no lookup waits for the answer, and log what it knows."""
        with suppress(RuntimeError):  # the process may start no further thread
            threading.Thread(target=self._look, args=(client,), name="kvstore-other-ranks", daemon=True).start()

    def _look(self, client: KVClient) -> None:
        """Failures are ignored: this is only a hint."""
        metadata = client.context.metadata
        if metadata is None:
            return
        try:
            counts = other_counts(metadata.namespaces(_TIMEOUT_S), self._own)
        except KVStoreError:
            return
        if counts:
            self.told = True
            _log.warning(
                "engines with other tensor parallelism share no KV with this engine: use KVStoreOffloadingConnector"
                " (kvclient.engines.vllm.tier) with canonical_layout on all of them (model=%s, parts=%d, other parts=%s)",
                self._own.model,
                self._own.shard_count,
                ", ".join(map(str, counts)),
            )
