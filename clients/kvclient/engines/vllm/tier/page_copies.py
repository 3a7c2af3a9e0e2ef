"""Which copies between pages and host memory may still touch rows that vLLM has given away. Pure.

A reset of vLLM's offloading frees all rows at once, but its workers end the copies of before the reset only in a later step. vLLM
orders its own copies after those. The tier's loads are in no such order, so none may begin until all workers have reported all
copies of before the reset. That has no deadline, since a copy without a report may still write. In the next step after a reset,
vLLM's workers wait for these copies, and a copy that fails ends the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class PageCopies:
    """Copies that vLLM's scheduler has planned and not all workers have reported.

    Args:
        workers: how many workers report each copy, once.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._open: dict[int, int] = {}
        """By vLLM's number of the copy: workers that have not reported it."""
        self._stale: set[int] = set()
        """Planned before the last reset."""

    @property
    def stale(self) -> bool:
        """Whether copies of before a reset may still touch rows."""
        return bool(self._stale)

    def planned(self, job_ids: Iterable[int]) -> None:
        """Record the copies of a step's plan, in both directions."""
        self._open.update(dict.fromkeys(job_ids, self._workers))

    def reported(self, ended: Mapping[int, int]) -> None:
        """Record how many workers have reported the end of copies."""
        for job_id, workers in ended.items():
            left = self._open.get(job_id, 0) - workers
            if left > 0:
                self._open[job_id] = left
            else:
                self._open.pop(job_id, None)
                self._stale.discard(job_id)

    def reset(self) -> None:
        """Record that vLLM has given all rows away."""
        self._stale = set(self._open)
