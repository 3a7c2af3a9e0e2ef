"""vLLM's requests whose chunks may be asked for, and the answers of the store to each.

The scheduler's thread adds, renews and removes requests. Lookup threads write only
the answers of the request that they were given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvclient import Lookup
from kvclient.engines.vllm.identity.keys import may_have_media
from kvclient.engines.vllm.tier.facts import TierGroup


class FailedLoads:
    """Chunks whose loads failed while any of the present requests existed, each once."""

    def __init__(self) -> None:
        self._last: dict[bytes, int] = {}
        """By key: number of the last failed load, in this order."""
        self.count = 0
        """Failed loads so far."""

    def __len__(self) -> int:
        return len(self._last)

    def record(self, keys: Iterable[bytes]) -> None:
        """Record a failed load."""
        self.count += 1
        for key in keys:
            self._last.pop(key, None)
            self._last[key] = self.count

    def failed_after(self, key: bytes, count: int) -> bool:
        """Return whether a load of a chunk failed after the first ``count`` failed loads."""
        return self._last.get(key, 0) > count

    def forget(self, count: int) -> None:
        """Forget the first ``count`` failed loads."""
        while self._last and self._last[key := next(iter(self._last))] <= count:
            del self._last[key]


@dataclass(slots=True, eq=False)
class TierRequest:
    """One request.

    Attributes:
        request: vLLM's.
        answers: by key: whether the store has the chunk.
        found: by group: the last lookup of its chain.
        asked: keys that were looked up, or will be.
        failed: loads of all requests that failed.
        failed_before: how many of them failed before this request. Later ones are not repeated for it, or it would never end.
        waits_since_s: when it began to wait for answers; None: it does not wait.
        gave_up: whether it waited too long, so that unknown keys are misses.
        ended: whether lookups for it are pointless.
    """

    request: Any
    answers: dict[bytes, bool] = field(default_factory=dict)
    found: dict[int, Lookup] = field(default_factory=dict)
    asked: set[bytes] = field(default_factory=set)
    failed: FailedLoads = field(default_factory=FailedLoads)
    failed_before: int = 0
    waits_since_s: float | None = None
    gave_up: bool = False
    ended: bool = False

    def chain(self, group: TierGroup, chunks: int) -> list[bytes]:
        """Return vLLM's hashes of the leading chunks."""
        return [bytes(one) for one in self.request.block_hashes[group.hashes - 1 : chunks * group.hashes : group.hashes]]

    def answer(self, key: bytes) -> bool | None:
        """Return whether the store has a chunk; None: not known yet."""
        if self.failed.failed_after(key, self.failed_before):
            return False
        return self.answers.get(key)

    def begin_wait(self, now_s: float) -> None:
        """Start the clock of ``waited_s`` with the first chunk that the request waits for."""
        if self.waits_since_s is None:
            self.waits_since_s = now_s

    def waited_s(self, now_s: float) -> float:
        """Return how long the request has waited for answers."""
        return 0.0 if self.waits_since_s is None else now_s - self.waits_since_s


class TierRequests:
    """All requests, except those whose KV vLLM's keys do not determine.

    These have an adapter, have media without names, or may go on after KV of drafts.
    """

    def __init__(self) -> None:
        self._known: dict[str, TierRequest] = {}
        """The oldest first."""
        self._failed = FailedLoads()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, request: Any, *, media_named: bool = True, keeps_drafts: bool = False) -> bool:  # noqa: ANN401
        """Remember a request, unless vLLM's keys do not determine its KV, and return whether it was remembered.

        ``media_named`` and ``keeps_drafts``: see ``engine_facts``.
        """
        if getattr(request, "lora_request", None) is not None or (not media_named and may_have_media(request)):
            return False
        if keeps_drafts and request.resumable:
            return False
        self.forget(request.request_id)
        self._known[request.request_id] = self._new(request)
        return True

    def _new(self, request: Any) -> TierRequest:  # noqa: ANN401
        return TierRequest(request, failed=self._failed, failed_before=self._failed.count)

    @property
    def failed_chunks(self) -> int:
        """Chunks whose failed loads are remembered."""
        return len(self._failed)

    def get(self, request_id: str) -> TierRequest | None:
        """Return a request; None: it has ended, or was not remembered."""
        return self._known.get(request_id)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        if (request := self._known.pop(request_id, None)) is not None:
            request.ended = True
            self._forget_failed()

    def _forget_failed(self) -> None:
        """Forget the failed loads that were before all present requests."""
        oldest = next(iter(self._known.values()), None)
        self._failed.forget(self._failed.count if oldest is None else oldest.failed_before)

    def renew(self) -> None:
        """Drop all answers: they belong to an earlier weights epoch. Late answers go to the old objects."""
        before, self._known = self._known, {}
        for request_id, old in before.items():
            old.ended = True
            self._known[request_id] = self._new(old.request)
        self._forget_failed()

    def end_waits(self, request_ids: Iterable[str]) -> None:
        """Note that requests do not wait for answers any more."""
        for request_id in request_ids:
            if (request := self._known.get(request_id)) is not None:
                request.waits_since_s, request.gave_up = None, False

    def record_failed(self, keys: frozenset[bytes]) -> None:
        """Note a failed load: all present requests treat these chunks as misses."""
        if self._known:
            self._failed.record(keys)
