"""Chooses the requests whose prefix is read ahead: those that stay in the engine's queue although their lookup is answered.

The step after its answer schedules a request for which the engine has room, and loads its prefix. So only a request that was
passed over once more is read ahead. Models with one KV cache group only: of others, a load reads some of the found pages, and
which ones is known when the engine gives the request its pages.
"""

from __future__ import annotations

from collections.abc import Callable

from kvclient.engines.vllm.plan import READ_AHEAD_S, AheadJob
from kvclient.engines.vllm.scheduler.prefix_lookup import PrefixMatch


class ReadsAhead:
    """Pure: events in, decisions out.

    Args:
        limit: requests that are read ahead at the same time; 0: none.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queued: dict[str, bool] = {}
        """Requests that are not read ahead, in order of arrival, and whether their lookup was answered before the last step."""
        self._begun: dict[str, tuple[int, float]] = {}
        """By request: leading blocks that are read ahead, and until when nodes hold them."""
        self._ended: list[str] = []

    def arrived(self, request_id: str) -> None:
        """A request entered the queue, and is looked up."""
        if self._limit:
            self._queued[request_id] = False

    def left(self, request_id: str, *, loads: bool = False) -> None:
        """A request left the queue. If it ``loads`` its prefix, the worker holds the blocks until it has."""
        self._queued.pop(request_id, None)
        if self._begun.pop(request_id, None) is not None and not loads:
            self._ended.append(request_id)

    def blocks(self, request_id: str) -> int:
        """Return how many leading blocks of a request are read ahead."""
        blocks, _ = self._begun.get(request_id, (0, 0.0))
        return blocks

    @property
    def has_ended(self) -> bool:
        """Whether reads ahead wait to be ended by the next step."""
        return bool(self._ended)

    def clear(self) -> None:
        """All lookups are outdated."""
        self._queued.clear()
        self._ended += sorted(self._begun)
        self._begun.clear()

    def plan(self, answer: Callable[[str], PrefixMatch | None], now_s: float) -> tuple[list[AheadJob], list[str]]:
        """Return the requests to be read ahead from this step on, and those to be ended before that.

        Args:
            answer: gives the answer to the lookup of a request; None: there is none yet.
            now_s: monotonic time.
        """
        self._renew(now_s)
        jobs = []
        for request_id, passed_over in list(self._queued.items()):
            if len(self._begun) >= self._limit:
                break
            if (match := answer(request_id)) is None:
                continue
            if not passed_over:
                self._queued[request_id] = True
                continue
            del self._queued[request_id]
            if match.hit_blocks and len(match.by_group) == 1:
                self._begun[request_id] = match.hit_blocks, now_s + READ_AHEAD_S
                lookups = {name: found.part(0, match.hit_blocks) for name, found in match.by_group[0].items()}
                jobs.append(AheadJob(request_id, lookups))
        ended, self._ended = self._ended, []
        return jobs, ended

    def _renew(self, now_s: float) -> None:
        """Queue requests whose blocks are no longer held again, before all others: they have waited for longest."""
        over = [request_id for request_id, (_, until_s) in self._begun.items() if until_s <= now_s]
        if over:
            for request_id in over:
                del self._begun[request_id]
            self._ended += over
            self._queued = dict.fromkeys(over, True) | self._queued
