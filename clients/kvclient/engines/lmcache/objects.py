"""LMCache's objects in the store: lookups, loads and stores of batches. All calls wait; they run in threads of the adapter."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvclient import HeadLookup, KVClient, KVStoreError, Outcome
from kvclient.engines.fallbacks import LOOKUP_FAILURES
from kvclient.engines.lmcache.counters import AdapterCounters
from kvclient.engines.lmcache.layouts import ObjectLayout, SeenLayouts
from kvclient.engines.lmcache.namespaces import REFUSALS, NamespaceClients
from kvclient.engines.lmcache.object_keys import KeyParts, is_strong, store_key
from kvclient.engines.lmcache.options import AdapterOptions
from kvclient.results import HELD, Run
from kvstore.core.errors import DeadlineExceeded
from kvstore.core.types import BlockKey

_MOST_FOUND = 65_536
Sized = tuple[Any, int]
"""LMCache's key of an object and its bytes."""


@dataclass(slots=True)
class _Batch:
    """Objects of one namespace in a task.

    Attributes:
        client: connected in that namespace.
        at: their positions in the task.
        keys: the store's.
    """

    client: KVClient
    at: list[int]
    keys: list[BlockKey]


class ObjectStore:
    """The store as LMCache sees it. Thread-safe.

    Args:
        options: the options.
        counters: counts fallbacks.
    """

    def __init__(self, options: AdapterOptions, counters: AdapterCounters) -> None:
        self._options = options
        self._counters = counters
        self._clients = NamespaceClients(options.hook, counters)
        self._seen = SeenLayouts(options.object_bytes)
        self._lock = threading.Lock()
        self._found: OrderedDict[BlockKey, tuple[Run, ...]] = OrderedDict()
        """By key: the replicas that the last lookup named."""

    @property
    def namespaces(self) -> list[str]:
        """The namespaces in use."""
        return [client.spec.namespace.hex() for client in self._clients.opened()]

    # ---- lookups ----
    def find(self, keys: Sequence[KeyParts], stated: Mapping[int, ObjectLayout | None], end_s: float) -> list[bool]:
        """Return which objects the store holds, with one call per layout.

        Args:
            keys: LMCache's.
            stated: by object group: the layout that LMCache states.
            end_s: monotonic time at which the lookup ends.
        """
        held = [False] * len(keys)
        by_layout: dict[tuple[str, ObjectLayout], list[int]] = {}
        groups: dict[tuple[str, int], list[ObjectLayout]] = {}
        for at, key in enumerate(keys):
            group = (key.model_name, key.object_group_id)
            if group not in groups:
                groups[group] = self._seen.candidates(*group, stated.get(group[1]))
            for layout in groups[group]:
                by_layout.setdefault((group[0], layout), []).append(at)
        for (model, layout), every in by_layout.items():
            wanted = [at for at in every if not held[at] and is_strong(keys[at])]
            if not wanted:
                continue
            try:
                with self._batch(model, layout, wanted, keys, end_s) as batch:
                    found = batch.client.lookup_heads(batch.keys, deadline_s=_left_s(end_s))
                self._remember(found)
                for at, one in zip(batch.at, found.held.tolist(), strict=True):
                    held[at] = one
                error = found.error
            except REFUSALS as refusal:
                self._counters.failed("objects_refused", len(wanted), "objects not looked up: reported as misses", refusal)
                continue
            except KVStoreError as failure:
                error = failure
            if error is None:
                self._counters.answered()
            else:
                self._counters.failed(LOOKUP_FAILURES, 1, "lookup failed: reported as misses", error)
        return held

    def _remember(self, found: HeadLookup) -> None:
        """Keep the replicas that a lookup named for the load that follows, of the newest keys only."""
        runs: list[list[Run]] = [[] for _ in found.keys]
        for run in found.runs:
            for at in range(run.start, run.end):
                runs[at].append(run)
        with self._lock:
            for key, named in zip(found.keys, runs, strict=True):
                self._found.pop(key, None)
                if named:
                    self._found[key] = tuple(named)
            while len(self._found) > _MOST_FOUND:
                self._found.popitem(last=False)

    def _remembered(self, keys: Sequence[BlockKey]) -> HeadLookup | None:
        """Return what earlier lookups found; None: not all of these keys."""
        with self._lock:
            named = [self._found.pop(key, ()) for key in keys]
        if not all(named):
            return None
        runs: list[Run] = []
        last: dict[str, int] = {}
        for at, replicas in enumerate(named):
            for one in replicas:
                index = last.get(one.volume_id)
                if index is not None and runs[index].end == at:
                    before = runs[index]
                    runs[index] = Run(before.start, before.count + 1, before.node, before.tier, before.volume_id)
                else:
                    last[one.volume_id] = len(runs)
                    runs.append(Run(at, 1, one.node, one.tier, one.volume_id))
        return HeadLookup(list(keys), tuple(runs))

    # ---- loads ----
    def load(self, keys: Sequence[KeyParts], objects: Sequence[Any], end_s: float) -> list[bool]:
        """Load objects. When this returns, nothing writes to them any more.

        Args:
            keys: LMCache's.
            objects: LMCache's memory objects.
            end_s: monotonic time at which the load ends. Objects that have not arrived by then are misses.

        Returns:
            Which have arrived.
        """
        arrived = [False] * len(keys)
        cause: object = None
        for model, layout, every in self._by_layout(keys, objects):
            try:
                with self._batch(model, layout, every, keys, end_s) as batch:
                    found = self._remembered(batch.keys)
                    if found is None:
                        found = batch.client.lookup_heads(batch.keys, deadline_s=_left_s(end_s))
                    buffers = [objects[at].byte_array for at in batch.at]
                    result = batch.client.load(found, buffers, deadline_s=_left_s(end_s))
                for at, hit in zip(batch.at, (result.outcomes == Outcome.HIT).tolist(), strict=True):
                    arrived[at] = hit
                if missing := result.shortfall:
                    cause = f"{missing}, lookup failed: {found.error}" if found.error is not None else missing
            except KVStoreError as failure:
                cause = failure
        good = sum(arrived)
        self._counters.add("loaded_objects", good)
        if good < len(keys):
            self._counters.failed("load_missing_objects", len(keys) - good, "objects not loaded: reported as misses", cause)
        return arrived

    # ---- stores ----
    def store(self, keys: Sequence[KeyParts], objects: Sequence[Any], end_s: float) -> tuple[list[Sized], bool, int]:
        """Store objects; arguments as for ``load``.

        Returns:
            LMCache's keys and sizes of the objects that the store holds now, whether these are all, and the bytes that were
            written.
        """
        held: list[Sized] = []
        size = 0
        cause: object = None
        for model, layout, every in self._by_layout(keys, objects):
            try:
                with self._batch(model, layout, every, keys, end_s) as batch:
                    buffers = [objects[at].byte_array for at in batch.at]
                    result = batch.client.store_heads(batch.keys, buffers, deadline_s=_left_s(end_s))
                size += result.bytes_stored
                stored = HELD[result.outcomes].tolist()
                held += [(keys[at], layout.size) for at, one in zip(batch.at, stored, strict=True) if one]
                cause = result.shortfall or cause
            except KVStoreError as failure:
                cause = failure
        self._counters.add("stored_objects", len(held))
        if len(held) < len(keys):
            self._counters.failed("store_missing_objects", len(keys) - len(held), "objects not stored", cause)
        return held, len(held) == len(keys), size

    def still_held(self, keyed: Sequence[tuple[Any, int]], end_s: float) -> list[bool] | None:
        """Return whether objects, each with its size, are still stored; None: the store does not answer."""
        held = [False] * len(keyed)
        groups: dict[tuple[str, ObjectLayout], list[int]] = {}
        keys = [key for key, _ in keyed]
        for at, (key, size) in enumerate(keyed):
            for layout in self._seen.candidates(key.model_name, key.object_group_id, None):
                if layout.size == size:
                    groups.setdefault((key.model_name, layout), []).append(at)
        for (model, layout), every in groups.items():
            with self._batch(model, layout, every, keys, end_s) as batch:
                found = batch.client.lookup_heads(batch.keys, deadline_s=_left_s(end_s))
            if found.error is not None:
                self._counters.failed(LOOKUP_FAILURES, 1, "usage not checked", found.error)
                return None
            self._counters.answered()
            for at in np.flatnonzero(found.held).tolist():
                held[batch.at[at]] = True
        return held

    def _by_layout(self, keys: Sequence[KeyParts], objects: Sequence[Any]) -> Iterator[tuple[str, ObjectLayout, list[int]]]:
        """Yield the positions of objects by model and layout, and remember these layouts."""
        by_layout: dict[tuple[str, ObjectLayout], list[int]] = {}
        weak = unknown = 0
        for at, (key, one) in enumerate(zip(keys, objects, strict=True)):
            layout = layout_of(one)
            if not is_strong(key):
                weak += 1
            elif layout is None or (layout.is_unstructured and layout.size not in self._options.object_bytes):
                unknown += 1
            else:
                by_layout.setdefault((key.model_name, layout), []).append(at)
        if weak:
            self._counters.failed("weak_hashes", weak, "objects skipped: start LMCache with --hash-algorithm blake3")
        if unknown:
            self._counters.failed("unknown_objects", unknown, "objects skipped: nothing says how their bytes are encoded")
        for (model, layout), every in by_layout.items():
            for group in {keys[one].object_group_id for one in every}:
                self._seen.record(model, group, layout)
            yield model, layout, every

    @contextmanager
    def _batch(self, model: str, layout: ObjectLayout, at: list[int], keys: Sequence[KeyParts], end_s: float) -> Iterator[_Batch]:
        spec = layout.spec(self._options.hook, model, self._options.chunk_tokens)
        with self._clients.client(spec, end_s) as client:
            yield _Batch(client, at, [store_key(spec.namespace, keys[one]) for one in at])

    def close(self) -> None:
        """Close all clients."""
        self._clients.close()


def layout_of(memory: Any) -> ObjectLayout | None:  # noqa: ANN401
    """Return the layout of one of LMCache's memory objects; None: it is empty, or its size is not that of its tensors."""
    meta = memory.metadata
    size = int(memory.get_size())
    shapes, dtypes = (meta.shapes, meta.dtypes) if meta.shapes is not None else ([meta.shape], [meta.dtype])
    layout = ObjectLayout.of_tensors(shapes, dtypes)
    return layout if layout is not None and layout.size == size else None


def _left_s(end_s: float) -> float:
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceeded("the deadline of the task passed before the store was called")
    return left_s
