"""The two ways of storing pages.

**Chained**, the store's regular way: each page follows its parent at its depth. One lookup finds the longest stored prefix of a
prompt, and one call moves a batch. This requires the keys of all pages before a batch.

**Single**: each page is a chain of its own, without a parent. This is used if the preceding pages are unknown, or if only some
pages of a chain exist (the state of a sliding window or a recurrent layer at certain positions).

Both return results per page, of which SGLang uses the leading ones.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvclient import BlockBuffer, BlockKey, HeadLookup, KVClient, Lookup, Outcome
from kvclient.engines.sglang.page_keys import PageKeys, Prefix
from kvclient.memory.buffers import pick_blocks

_MOST_KEYS = 65_536
"""Maximum pages per lookup: the store's limit."""
_LOOKUPS_KEPT = 32


class PageStore(Protocol):
    """Pages of one namespace, named by their hashes. Thread-safe; failures of the store count as misses.

    Every method raises ``InvalidArgument`` for an invalid page hash or a buffer of the wrong size.
    """

    def held(self, hashes: Sequence[str], prefix: Prefix) -> int:
        """Return how many leading pages can be served, as far as is known."""

    def load(self, hashes: Sequence[str], buffer: BlockBuffer, prefix: Prefix) -> list[bool]:
        """Load pages into a buffer. Return which are present, complete and verified."""

    def store(self, hashes: Sequence[str], buffer: BlockBuffer, prefix: Prefix) -> list[bool]:
        """Store pages. Return which the store now holds."""


class ChainedPages:
    """Stores pages as chains.

    Args:
        client: of their namespace.
        load_deadline_s: bound of a load.
        store_deadline_s: bound of a store.
    """

    def __init__(self, client: KVClient, load_deadline_s: float, store_deadline_s: float) -> None:
        self._client = client
        self._keys = PageKeys(client.spec.namespace)
        self._load_deadline_s = load_deadline_s
        self._store_deadline_s = store_deadline_s
        self._recent = _RecentLookups()

    def held(self, hashes: Sequence[str], prefix: Prefix) -> int:
        return self._look_up(self._keys.of(hashes), prefix).hit_blocks

    def load(self, hashes: Sequence[str], buffer: BlockBuffer, prefix: Prefix) -> list[bool]:
        keys = self._keys.of(hashes)
        found = self._recent.find(keys) or self._look_up(keys, prefix)
        # Load all pages regardless of the index: this host's node knows its own blocks better.
        wanted = Lookup(keys, len(keys), found.runs, found.parent, found.depth)
        result = self._client.load(wanted, buffer, deadline_s=self._load_deadline_s)
        flags: list[bool] = (result.outcomes == Outcome.HIT).tolist()
        return flags

    def store(self, hashes: Sequence[str], buffer: BlockBuffer, prefix: Prefix) -> list[bool]:
        if not prefix.is_known:
            return [False] * len(hashes)  # at a guessed position the page would block the correct one
        parent = self._keys.of(prefix.hashes[-1:])
        result = self._client.store(
            self._keys.of(hashes),
            buffer,
            parent=parent[0] if parent else None,
            depth=prefix.depth,
            deadline_s=self._store_deadline_s,
        )
        return _leading(result.held_blocks, len(hashes))

    def _look_up(self, keys: list[BlockKey], prefix: Prefix) -> Lookup:
        """Look up a batch within its chain."""
        chain = [*self._keys.of(prefix.hashes), *keys]
        found = self._client.lookup(chain[:_MOST_KEYS])
        part = Lookup(chain, found.hit_blocks, found.runs, error=found.error).part(prefix.depth, len(chain))
        self._recent.keep(part)
        return part


class _RecentLookups:
    """The latest lookups: SGLang first looks up a prompt and shortly afterwards loads it, batch by batch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[BlockKey, tuple[dict[BlockKey, int], Lookup]] = OrderedDict()

    def keep(self, lookup: Lookup) -> None:
        if not lookup.hit_blocks:
            return
        places = {key: place for place, key in enumerate(lookup.keys[: lookup.hit_blocks])}
        with self._lock:
            self._kept.pop(lookup.keys[0], None)
            self._kept[lookup.keys[0]] = (places, lookup)
            if len(self._kept) > _LOOKUPS_KEPT:
                self._kept.popitem(last=False)

    def find(self, keys: list[BlockKey]) -> Lookup | None:
        """Return the part of a kept lookup that covers exactly these keys."""
        with self._lock:
            kept = list(self._kept.values())
        for places, lookup in reversed(kept):
            first = places.get(keys[0])
            if first is not None and lookup.keys[first : first + len(keys)] == keys and first + len(keys) <= lookup.hit_blocks:
                return lookup.part(first, first + len(keys))
        return None


class SinglePages:
    """Stores each page as its own chain.

    Args:
        client: of their namespace.
        load_deadline_s: bound of a load.
        store_deadline_s: bound of a store.
        lookup_deadline_s: bound of a lookup.
    """

    def __init__(self, client: KVClient, load_deadline_s: float, store_deadline_s: float, lookup_deadline_s: float) -> None:
        self._client = client
        self._keys = PageKeys(client.spec.namespace)
        self._load_deadline_s = load_deadline_s
        self._store_deadline_s = store_deadline_s
        self._lookup_deadline_s = lookup_deadline_s

    def held(self, hashes: Sequence[str], prefix: Prefix) -> int:  # noqa: ARG002  # what comes before matters to chains only
        return int(np.logical_and.accumulate(self.each_held(hashes)).sum())

    def each_held(self, hashes: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Return for each page whether it can be served, as far as is known.

        Raises:
            InvalidArgument: a hash is invalid.
        """
        keys = self._keys.of(hashes)
        held = np.zeros(len(keys), bool)
        found = self._client.lookup_heads(keys[:_MOST_KEYS], deadline_s=self._lookup_deadline_s)
        held[: len(found.keys)] = found.held
        return held

    def load(self, hashes: Sequence[str], buffer: BlockBuffer, prefix: Prefix) -> list[bool]:  # noqa: ARG002  # see held
        """Load pages from this host's node, then the missing ones from the nodes in the index."""
        keys, ends_s = self._keys.of(hashes), time.monotonic() + self._load_deadline_s
        hits = np.zeros(len(keys), bool)
        if self._client.local_node is not None:
            hits = self._client.load(HeadLookup(keys), buffer, deadline_s=self._load_deadline_s).outcomes == Outcome.HIT
        missing = np.flatnonzero(~hits)
        if len(missing) and (left_s := ends_s - time.monotonic()) > 0:
            found = self._client.lookup_heads([keys[at] for at in missing], deadline_s=min(left_s, self._lookup_deadline_s))
            if found.held.any() and (left_s := ends_s - time.monotonic()) > 0:
                result = self._client.load(found, pick_blocks(buffer, missing), deadline_s=left_s)
                hits[missing] = result.outcomes == Outcome.HIT
        flags: list[bool] = hits.tolist()
        return flags

    def store(self, hashes: Sequence[str], buffer: BlockBuffer, prefix: Prefix) -> list[bool]:  # noqa: ARG002  # see held
        result = self._client.store_heads(self._keys.of(hashes), buffer, deadline_s=self._store_deadline_s)
        return _leading(result.held_blocks, len(hashes))


def _leading(good: int, count: int) -> list[bool]:
    return [True] * good + [False] * (count - good)
