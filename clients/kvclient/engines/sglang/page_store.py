"""The two ways of storing pages.

**Chained**: as the store means it: each page after its parent, at its depth. One lookup tells how much of a prompt is there, one
call moves a batch. It takes to know what comes before a batch.

**Single**: each page is a chain of its own, with nothing before it: what is left where nobody tells, or where only some pages of
a chain exist (the state of a sliding window or a recurrent layer at certain points). Looking for them costs a call a page.

Both answer page by page, prefix first: SGLang uses leading pages only, so behind the first failure nothing is tried.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvclient import BlockBuffer, BlockKey, KVClient, Lookup, Outcome
from kvclient.engines.sglang.page_keys import PageKeys, Prefix
from kvclient.memory.buffers import pick_blocks

_MOST_KEYS = 65_536
"""Of one lookup: the store's bound."""
_LOOKUPS_KEPT = 32


class PageStore(Protocol):
    """Pages of one namespace, named by their hashes. Thread-safe; failures of the store are misses.

    Every method raises ``InvalidArgument`` for what is no page hash, or a buffer that does not fit.
    """

    def held(self, hashes: Sequence[str], prefix: Prefix) -> int:
        """How many leading pages can be served, as far as is known."""

    def load(self, hashes: Sequence[str], buffer: BlockBuffer, prefix: Prefix) -> list[bool]:
        """Brings pages into a buffer; which of them are there, complete and checked."""

    def store(self, hashes: Sequence[str], buffer: BlockBuffer, prefix: Prefix) -> list[bool]:
        """Stores pages; which of them the store holds now."""


class ChainedPages:
    """Pages as chains.

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
        # All of it is asked for, whatever the index says: the node of this host knows better what it has.
        wanted = Lookup(keys, len(keys), found.runs, found.parent, found.depth)
        result = self._client.load(wanted, buffer, deadline_s=self._load_deadline_s)
        flags: list[bool] = (result.outcomes == Outcome.HIT).tolist()
        return flags

    def store(self, hashes: Sequence[str], buffer: BlockBuffer, prefix: Prefix) -> list[bool]:
        if not prefix.told:
            return [False] * len(hashes)  # at a guessed place it would stand in the way of the right one
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
        """The lookup of a batch within its chain."""
        chain = [*self._keys.of(prefix.hashes), *keys]
        found = self._client.lookup(chain[:_MOST_KEYS])
        part = Lookup(chain, found.hit_blocks, found.runs, error=found.error).part(prefix.depth, len(chain))
        self._recent.keep(part)
        return part


class _RecentLookups:
    """The latest lookups: SGLang asks what is there, and a moment later loads it, batch by batch."""

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
        """The part of a kept lookup that is about exactly these keys."""
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
        lookup_deadline_s: bound of all lookups of one call together.
    """

    def __init__(self, client: KVClient, load_deadline_s: float, store_deadline_s: float, lookup_deadline_s: float) -> None:
        self._client = client
        self._keys = PageKeys(client.spec.namespace)
        self._load_deadline_s = load_deadline_s
        self._store_deadline_s = store_deadline_s
        self._lookup_deadline_s = lookup_deadline_s

    def held(self, hashes: Sequence[str], prefix: Prefix) -> int:  # noqa: ARG002  # what comes before matters to chains only
        """By bisection: they are stored prefix first, so where one is, those before it mostly are; a load finds which left."""
        has = self.probe(hashes)
        if not hashes or not has(0):
            return 0
        low, high, last = 0, len(hashes), len(hashes) - 1
        while high - low > 1:
            middle = last if high > last else (low + high) // 2  # first the last: most often all are there
            if has(middle):
                low = middle
            else:
                high = middle
        return low + 1

    def probe(self, hashes: Sequence[str]) -> Probe:
        """Answers about pages one by one.

        Raises:
            InvalidArgument: no page hashes.
        """
        return Probe(self._client, self._keys.of(hashes), self._lookup_deadline_s)

    def load(self, hashes: Sequence[str], buffer: BlockBuffer, prefix: Prefix) -> list[bool]:  # noqa: ARG002  # see held
        """First all at once from this host's node, then one by one, from wherever each is said to lie."""
        keys, ends_s = self._keys.of(hashes), time.monotonic() + self._load_deadline_s
        flags = [False] * len(keys)
        if self._client.local_node is not None:
            # With nobody named to fetch them from: a node that fetched them as a chain would note wrong places.
            result = self._client.load(Lookup(keys, len(keys)), buffer, deadline_s=self._load_deadline_s)
            flags = (result.outcomes == Outcome.HIT).tolist()
        for at, there in enumerate(flags):
            if there:
                continue
            left_s = ends_s - time.monotonic()
            if left_s <= 0 or not self._client.load([keys[at]], _one(buffer, at), deadline_s=left_s).hit_blocks:
                break
            flags[at] = True
        return flags

    def store(self, hashes: Sequence[str], buffer: BlockBuffer, prefix: Prefix) -> list[bool]:  # noqa: ARG002  # see held
        result = self._client.store_heads(self._keys.of(hashes), buffer, deadline_s=self._store_deadline_s)
        return _leading(result.held_blocks, len(hashes))


class Probe:
    """Whether single pages can be served. Each is asked for once, all within one deadline; after it, nothing is there.

    Args:
        client: whom to ask.
        keys: of the pages.
        deadline_s: seconds from now on.
    """

    def __init__(self, client: KVClient, keys: Sequence[BlockKey], deadline_s: float) -> None:
        self._client = client
        self._keys = keys
        self._ends_s = time.monotonic() + deadline_s
        self._known: dict[int, bool] = {}

    def __call__(self, page: int) -> bool:
        known = self._known.get(page)
        if known is None:
            left_s = self._ends_s - time.monotonic()
            known = left_s > 0 and bool(self._client.lookup([self._keys[page]], deadline_s=left_s).hit_blocks)
            self._known[page] = known
        return known


def _one(buffer: BlockBuffer, block: int) -> BlockBuffer:
    return pick_blocks(buffer, np.array([block]))


def _leading(good: int, count: int) -> list[bool]:
    return [True] * good + [False] * (count - good)
