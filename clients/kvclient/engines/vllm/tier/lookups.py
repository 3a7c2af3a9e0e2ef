"""Lookups in threads: vLLM asks key by key, and all keys of a step and request are looked up together.

An answer belongs to one request. So a miss or a failed lookup is not repeated by later requests with the same prefix.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvclient import KVStoreError, Unavailable
from kvstore.process.threads.submission import submit

if TYPE_CHECKING:
    from kvclient.engines.vllm.tier.chunks import ChunkStore
    from kvclient.engines.vllm.tier.counters import TierCounters
    from kvclient.engines.vllm.tier.facts import TierGroup
    from kvclient.engines.vllm.tier.requests import TierRequest

_THREADS = 2


@dataclass(slots=True)
class _Batch:
    """Keys of one request that wait for the end of the step, by group, with their positions in the chain."""

    request: TierRequest
    by_group: dict[int, dict[bytes, int | None]] = field(default_factory=dict)


class ChunkLookups:
    """Answers for vLLM's scheduler, which calls all methods.

    Args:
        deadline_s: how long a request waits for answers before it is computed.
        counters: counts failures.
        wake: called after answers arrived.
    """

    def __init__(self, deadline_s: float, counters: TierCounters, wake: Callable[[], None]) -> None:
        self._deadline_s = deadline_s
        self._counters = counters
        self._wake = wake
        self._batches: dict[int, _Batch] = {}
        self._lock = threading.Lock()
        self._pending = 0
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvstore-tier-lookup")

    @property
    def busy(self) -> bool:
        """Whether lookups wait or run; False once the answers of all are there."""
        with self._lock:
            return bool(self._pending)

    def ask(self, request: TierRequest, group_id: int, key: bytes, position: int | None) -> bool | None:
        """Return whether the store has a chunk; None: ask again in the next step.

        Args:
            request: the request.
            group_id: of the key.
            key: vLLM's key.
            position: in the chain of its group; None: it is the head of a separate chain.
        """
        answer = request.answer(key)
        if answer is not None:
            return answer
        now_s = time.monotonic()
        request.begin_wait(now_s)
        if request.waited_s(now_s) < self._deadline_s:
            if key not in request.asked:
                request.asked.add(key)
                self._batches.setdefault(id(request), _Batch(request)).by_group.setdefault(group_id, {})[key] = position
            return None
        if not request.gave_up:
            request.gave_up = True
            self._counters.failed("lookup_failures", 1, "lookup not answered in time: chunks are computed")
        return False

    def flush(self, stores: Mapping[int, ChunkStore], groups: Mapping[int, TierGroup]) -> None:
        """Start the lookups of this step."""
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            request = batch.request
            parts = []
            for group_id, positions in batch.by_group.items():
                chunks = max((at for at in positions.values() if at is not None), default=-1) + 1
                chain = request.chain(groups[group_id], chunks) if group_id in groups else []
                parts.append((group_id, stores.get(group_id), positions, chain))
            with self._lock:
                self._pending += 1
            try:
                submit(self._pool, self._look_up, request, parts)
            except Unavailable as error:
                self._counters.failed("lookup_failures", 1, "lookup failed: chunks are computed", error)
                for _, _, positions, _ in parts:
                    request.answers.update(dict.fromkeys(positions, False))
                self._answered(request)

    def _look_up(
        self, request: TierRequest, parts: list[tuple[int, ChunkStore | None, dict[bytes, int | None], list[bytes]]]
    ) -> None:
        """Answer one batch; keys whose lookup failed are misses."""
        given_up = self._stopping.is_set() or request.ended or request.waited_s(time.monotonic()) >= self._deadline_s
        for group_id, store, positions, chain in parts:
            answers = dict.fromkeys(positions, False)
            if store is not None and not given_up:
                try:
                    held, found, error = store.find(positions, chain)
                    answers.update(held)
                    if found is not None:
                        request.found[group_id] = found
                    if error is None:
                        self._counters.answered()
                    else:
                        self._counters.failed("lookup_failures", 1, "lookup failed: chunks are computed", error)
                except KVStoreError as error:
                    self._counters.failed("lookup_failures", 1, "lookup failed: chunks are computed", error)
                except Exception as error:  # noqa: BLE001  # the edge of the thread: the request must not wait until its deadline
                    self._counters.bug("lookup", error)
            request.answers.update(answers)
        self._answered(request, waited=not given_up)

    def _answered(self, request: TierRequest, *, waited: bool = True) -> None:
        """Record the end of one batch. ``waited``: the request need not wait for it any more."""
        if waited:
            request.waits_since_s = None
        with self._lock:
            self._pending -= 1
        self._wake()

    def shutdown(self) -> None:
        """End the threads. Lookups that have not begun are misses."""
        self._stopping.set()
        self._pool.shutdown(cancel_futures=True)
