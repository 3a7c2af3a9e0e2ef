"""The movers: pages to and from the store, in the background. No vLLM types.

* A load outside of the batch runs in threads of the client's. Its end, good or bad, is told once; what did not arrive is named.
* A layer-wise load runs while the batch computes: each layer waits until it has arrived. A layer that does not come in time ends
  the load, and all that it should have brought counts as not loaded.
* A store runs in one thread, in the order of the steps, so that a block is stored after its parent. Pages are pinned meanwhile.

Blocks that a step computed are not stored if a layer-wise load of that step failed: some of them were computed from garbage.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvclient import BlockKey, KVClient, LoadHandle
from kvclient.engines.vllm.keys import Masked
from kvclient.engines.vllm.options import ConnectorOptions
from kvclient.engines.vllm.pages import GroupPages
from kvclient.engines.vllm.plan import LoadJob, SaveJob, StepAnswer, StepPlan

_log = logging.getLogger(__name__)
_POLL_S = 0.0005


@dataclass(slots=True)
class GroupFlight:
    """A group's part of a load under way."""

    group: int
    block_ids: list[int]
    handle: LoadHandle

    def missing(self) -> list[int]:
        """Pages that did not arrive; waits for the end."""
        return self.block_ids[self.handle.result().hit_blocks :]


@dataclass(slots=True)
class Flight:
    """A load under way."""

    request_id: str
    parts: list[GroupFlight]

    @property
    def done(self) -> bool:
        """Whether all parts have ended."""
        return all(part.handle.done for part in self.parts)


@dataclass(slots=True)
class Arrivals:
    """What became of loads since the last question.

    Attributes:
        received: requests whose load outside of the batch has ended.
        failed: those among them of which something is missing.
        missing: pages that did not arrive, of any load.
    """

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)


class WorkerSide:
    """The connector's half in a worker. Called by the worker's one thread.

    Args:
        options: choices.
        clients: by group: a client in the group's namespace.
        pages: by group: its memory.
        layers: by group: names of its layers, in order.
        stores: whether this worker stores; another rank with the same bytes may do it.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        clients: Sequence[KVClient],
        pages: Sequence[GroupPages],
        layers: Sequence[Sequence[str]],
        *,
        stores: bool = True,
    ) -> None:
        self._options = options
        self._clients = clients
        self._pages = pages
        self._layer_place = {name: (group, at) for group, names in enumerate(layers) for at, name in enumerate(names)}
        self._flights: list[Flight] = []
        self._in_step: list[Flight] = []
        self._arrivals = Arrivals()
        self._step_failed = False
        self._saver = Saver(options, clients, pages) if stores else None
        self._answer = StepAnswer()

    # ---- loads ----
    def begin_loads(self, plan: StepPlan) -> None:
        """Begins the loads of a step."""
        self._step_failed = False
        for job in plan.loads:
            flight = self._begin(job)
            (self._in_step if job.layerwise else self._flights).append(flight)

    def _begin(self, job: LoadJob) -> Flight:
        parts = []
        for part in job.groups:
            client, pages = self._clients[part.group], self._pages[part.group]
            lookup = part.lookups[bytes(client.spec.namespace)]
            handle = client.start_load(
                lookup,
                pages.buffer(part.block_ids),
                deadline_s=self._options.hook.load_deadline_s,
                layerwise=job.layerwise,
            )
            parts.append(GroupFlight(part.group, part.block_ids, handle))
        return Flight(job.request_id, parts)

    def wait_layer(self, name: str) -> None:
        """Waits until a layer of this step's layer-wise loads has arrived."""
        if not self._in_step:
            return
        place = self._layer_place.get(name)
        if place is None:
            return
        for flight in self._in_step:
            for part in flight.parts:
                if part.group == place[0] and not part.handle.wait_layer(place[1]):
                    part.handle.cancel()  # nobody may write into these pages any more: they will be computed

    def end_forward(self, plan: StepPlan) -> None:
        """The forward pass of a step, if it had one, is over: its blocks are complete."""
        for flight in self._in_step:
            missing = [page for part in flight.parts for page in part.missing()]
            if missing:
                self._arrivals.missing.update(missing)
                self._step_failed = True
        self._in_step = []
        if not plan.saves:
            return
        if self._saver is None or self._step_failed:
            for job in plan.saves:
                self._answer.saved[job.job_id] = 1
                if self._step_failed:
                    self._answer.not_saved.add(job.job_id)
            return
        self._saver.add(plan.chain, plan.saves)

    def arrivals(self, plan: StepPlan, finished: set[str]) -> Arrivals:
        """Loads that have ended since the last call.

        Args:
            plan: this step's; one without tokens may wait a moment for something to end.
            finished: requests that nobody wants any more: their loads are given up.
        """
        for flight in self._flights:
            if flight.request_id in finished:
                for part in flight.parts:
                    if not part.handle.done:
                        threading.Thread(target=part.handle.cancel, name="kvstore-cancel", daemon=True).start()
        if not plan.has_tokens:
            self._rest()
        for flight in [flight for flight in self._flights if flight.done]:
            self._flights.remove(flight)
            missing = [page for part in flight.parts for page in part.missing()]
            self._arrivals.received.add(flight.request_id)
            if missing:
                self._arrivals.failed.add(flight.request_id)
                self._arrivals.missing.update(missing)
        found, self._arrivals = self._arrivals, Arrivals()
        return found

    def _rest(self) -> None:
        """An engine without tokens to compute steps again and again until loads and stores are over: not too fast."""
        if self._flights:
            handle = self._flights[0].parts[0].handle
            handle.wait_layer(len(self._layer_place_of(self._flights[0].parts[0].group)) - 1, self._options.idle_wait_s)
        elif self._saver is not None:
            self._saver.wait(self._options.idle_wait_s)

    def _layer_place_of(self, group: int) -> Sequence[int]:
        return range(self._pages[group].shape.layers)

    # ---- stores ----
    def answer(self) -> StepAnswer | None:
        """What has been stored since the last call; None: nothing."""
        if self._saver is not None:
            self._answer.merge(self._saver.take())
        if not self._answer.saved:
            return None
        answer, self._answer = self._answer, StepAnswer()
        return answer

    def close(self) -> None:
        """Ends loads and stores under way."""
        for flight in self._flights + self._in_step:
            for part in flight.parts:
                part.handle.cancel()
        if self._saver is not None:
            self._saver.close()
        for client in self._clients:
            client.close()


class Saver:
    """Stores pages in a thread of its own, in order."""

    def __init__(self, options: ConnectorOptions, clients: Sequence[KVClient], pages: Sequence[GroupPages]) -> None:
        self._options = options
        self._clients = clients
        self._pages = pages
        self._jobs: queue.SimpleQueue[tuple[bytes, SaveJob] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._answer = StepAnswer()
        self._pending = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-save", daemon=True)
        self._thread.start()

    def add(self, chain: bytes, jobs: Sequence[SaveJob]) -> None:
        """More to store. Bounded by the pins: the scheduler side plans no more than a share of the pages."""
        with self._changed:
            self._pending += len(jobs)
        for job in jobs:
            self._jobs.put((chain, job))

    def take(self) -> StepAnswer:
        """What is done."""
        with self._changed:
            answer, self._answer = self._answer, StepAnswer()
            return answer

    def wait(self, timeout_s: float) -> None:
        """Waits a moment for something to be done, if there is anything to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._answer.saved or not self._pending, timeout_s)

    def _run(self) -> None:
        while (taken := self._jobs.get()) is not None:
            chain, job = taken
            held = not self._closed and self._store(chain, job)
            with self._changed:
                self._pending -= 1
                self._answer.saved[job.job_id] = 1
                if not held:
                    self._answer.not_saved.add(job.job_id)
                self._changed.notify_all()

    def _store(self, chain: bytes, job: SaveJob) -> bool:
        """Stores one job's blocks of all groups; whether the store holds them all now."""
        for client, pages, ids in zip(self._clients, self._pages, job.block_ids, strict=True):
            masked = Masked(chain, client.spec.namespace)
            result = client.store(
                masked.keys(job.keys),
                pages.buffer(ids),
                parent=BlockKey(masked.keys([job.parent])) if job.parent is not None else None,
                depth=job.first_block,
                deadline_s=self._options.hook.store_deadline_s,
            )
            if result.held_blocks < len(ids):
                return False
        return True

    def close(self) -> None:
        """Gives up what waits, and ends."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join(self._options.hook.store_deadline_s + 1)
