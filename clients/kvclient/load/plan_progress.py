"""Progress reports of planned loads, off the critical path: a late or lost report only makes the next plan a little worse."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from kvproto.v1 import metadata_pb2
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.process.threads.submission import start_thread

MAX_PLANS = 4_096
"""Plans with unsent progress. More of them are not reported, and the planner forgets them in time."""
_PAUSE_S = 0.005
"""Pause between two calls, so that one call reports many loads. After a longer pause, plans would treat idle links as busy."""

Send = Callable[[metadata_pb2.ReportLoadsRequest], metadata_pb2.ReportLoadsResponse]


class PlanProgressReporter:
    """Collects progress of planned loads and sends it from a separate thread. Thread-safe.

    Args:
        send: does one call, bounded in time.
        incidents: counts failures.
    """

    def __init__(self, send: Send, incidents: LimitedLog) -> None:
        self._send = send
        self._incidents = incidents
        self._changed = threading.Condition()
        self._moved: dict[int, dict[int, int]] = {}
        self._finished: set[int] = set()
        self._restored: dict[int, metadata_pb2.PlanInProgress] = {}
        self._forgotten: set[int] = set()
        self._closed = False
        self._thread: threading.Thread | None = None

    def tell(
        self,
        moved: Mapping[int, Sequence[tuple[int, int]]],
        *,
        finished: bool,
        restored: Mapping[int, metadata_pb2.PlanInProgress] = MappingProxyType({}),
    ) -> None:
        """Report progress: plan -> (part, blocks done).

        Args:
            moved: the progress.
            finished: these loads have ended.
            restored: plans of ``moved`` that the planner has forgotten and shall count again.
        """
        with self._changed:
            if finished:
                self._forgotten.difference_update(moved)
            if self._closed or len(self._moved) + len(moved) > MAX_PLANS:
                self._incidents.counters.add(client_metrics.REPORTS_DROPPED, len(moved))
                return
            for plan_id, parts in moved.items():
                self._moved.setdefault(plan_id, {}).update(parts)
            self._restored.update(restored)
            if finished:
                self._finished.update(moved)
            if self._thread is None:
                self._thread = start_thread(self._run, "kvclient-report")
                if self._thread is None:  # the next call tries again
                    self._incidents.report(client_metrics.REPORTS_FAILED, "progress of loads not reported yet: no more threads")
            self._changed.notify()

    def take_forgotten(self, plan_ids: Iterable[int]) -> set[int]:
        """Those of these plans that the planner has forgotten since the last call: a new planner does not count them."""
        with self._changed:
            taken = self._forgotten.intersection(plan_ids)
            self._forgotten -= taken
            return taken

    def close(self) -> None:
        """Stop the thread after the call under way."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._moved or self._closed)
                self._changed.wait_for(lambda: self._closed, _PAUSE_S)
                moved, self._moved = self._moved, {}
                finished, self._finished = self._finished, set()
                restored, self._restored = self._restored, {}
                closed = self._closed
            if moved:
                request = metadata_pb2.ReportLoadsRequest()
                for plan_id, parts in moved.items():
                    report = request.loads.add(plan_id=plan_id, finished=plan_id in finished, restored_plan=restored.get(plan_id))
                    for index, done in parts.items():
                        report.parts.add(index=index, blocks_done=done)
                try:
                    forgotten = set(self._send(request).forgotten) & moved.keys() - finished
                    with self._changed:
                        self._forgotten |= forgotten - self._finished
                except Exception as error:  # noqa: BLE001  # thread edge; the planner forgets plans without reports
                    self._incidents.report(client_metrics.REPORTS_FAILED, "progress of loads not reported", error)
            if closed:
                return
