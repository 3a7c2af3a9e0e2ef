"""The movers: pages to and from the store, in the background. No vLLM types.

* A load outside of the batch runs in threads of the client's. Its end, good or bad, is told once; what did not arrive is named.
* A layer-wise load runs while the batch computes: each layer waits until it has arrived. A layer that does not come in time ends
  the load, and all that it should have brought counts as not loaded.
* Stores: see ``store_worker``.

Blocks that a step computed are not stored if a layer-wise load of that step failed: some of them were computed from garbage. That
another worker's load failed is not known here: see ``scheduler_connector``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvclient import KVClient, KVStoreError, LoadHandle, LoadResult, Tier
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.memory.pages import Mark, Pages
from kvclient.engines.vllm.options import RESET_GRACE_S, ConnectorOptions
from kvclient.engines.vllm.plan import GroupLoad, LoadJob, SaveJob, StepAnswer, StepPlan
from kvclient.engines.vllm.worker.store_worker import StoreWorker

_log = logging.getLogger(__name__)
_TIER_COUNTERS = {Tier.DRAM: "load_dram_bytes", Tier.NVME: "load_nvme_bytes"}

Connect = Callable[[str], Sequence[KVClient]]
"""Makes the clients of a weights epoch, one a group."""


class InflightGroupLoad:
    """A group's part of a load under way.

    Args:
        job: what is loaded.
        handle: the load; None: it could not even begin.
        pages: of the group.
    """

    def __init__(self, job: GroupLoad, handle: LoadHandle | None, pages: Pages) -> None:
        self.group = job.group
        self._block_ids = job.block_ids
        self._behind = job.behind
        self._handle = handle
        self._pages = pages
        self._spoiled = handle is None
        self._waited: set[int] = set()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._handle is None or self._handle.done

    def wait_layer(self, layer: int) -> None:
        """Waits until a layer has arrived; where it does not in time, the load ends, and nothing of it counts.

        On a device: until it is on its way; what the engine asks of the device next begins when it is there.
        """
        self._waited.add(layer)
        if self._handle is not None and not self._spoiled and not self._handle.wait_layer(layer):
            self._spoiled = True
            self._handle.cancel()  # nobody may write into these pages any more: they will be computed

    def wait(self, timeout_s: float) -> None:
        """Waits a moment for its end."""
        if self._handle is not None:
            self._handle.wait_layer(self._pages.shape.layers - 1, timeout_s)

    def cancel(self) -> None:
        """Gives it up. When this has returned, nothing touches the pages any more."""
        if self._handle is not None:
            self._handle.cancel()

    def end_in_step(self, tally: ConnectorCounters) -> list[int]:
        """The same as ``end``, of a layer-wise load: it fails if the forward pass has not waited for each layer."""
        if not self._spoiled and len(self._waited) < self._pages.shape.layers:
            self._spoiled = True
            tally.add("bugs")
            _log.error("a forward pass used layers that it had not waited for: their load counts as failed")
        return self.end(tally)

    def end(self, tally: ConnectorCounters) -> list[int]:
        """Waits for the end and counts it; the pages that may not be used, in which nothing of it is left."""
        result = self._handle.result() if self._handle is not None else None
        good = 0 if result is None or self._spoiled else result.hit_blocks
        if result is not None:
            _count_load(tally, result)
        missing = self._block_ids[good:]
        if missing:
            tally.add("load_missing_blocks", len(missing))
            self._pages.clear([*missing, *self._behind])
        return missing


@dataclass(slots=True)
class InflightLoad:
    """A load under way."""

    request_id: str
    parts: list[InflightGroupLoad]

    @property
    def done(self) -> bool:
        """Whether all parts have ended."""
        return all(part.done for part in self.parts)

    def cancel(self) -> None:
        """Gives all parts up."""
        for part in self.parts:
            part.cancel()

    def cancel_soon(self) -> None:
        """The same, without waiting for the pieces that are being moved."""
        if not self.done:
            threading.Thread(target=self.cancel, name="kvstore-cancel", daemon=True).start()


@dataclass(slots=True)
class LoadCompletions:
    """What became of loads since the last question.

    Attributes:
        received: requests whose load outside of the batch has ended.
        failed: those among them of which something is missing.
        missing: pages that did not arrive, of any load.
    """

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)


class WorkerConnector:
    """The connector's half in a worker. Called by the worker's one thread.

    Args:
        options: choices.
        connect: makes clients.
        weights_epoch: the epoch to begin with.
        pages: by group: its memory.
        layers: by group: names of its layers, in order.
        stores: whether this worker stores; another rank with the same bytes may do it.
        weights: digests the weights that the engine holds now.
        digest: what ``weights`` returned at the start.
        rank: of this worker.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        connect: Connect,
        weights_epoch: str,
        pages: Sequence[Pages],
        layers: Sequence[Sequence[str]],
        *,
        stores: bool = True,
        weights: Callable[[], str] = str,
        digest: str = "",
        rank: int = 0,
    ) -> None:
        self.tally = ConnectorCounters()
        self._options = options
        self._connect = connect
        self.digest_weights = weights
        self._digest = digest
        self._rank = rank
        self._outdated = False
        """The weights changed, and the scheduler has not named their epoch yet: nothing is loaded or stored."""
        self._epoch = 0
        self.pages = pages
        self.clients = connect(weights_epoch)
        self.place = {name: (group, at) for group, names in enumerate(layers) for at, name in enumerate(names)}
        self._flights: list[InflightLoad] = []
        self._in_step: list[InflightLoad] = []
        self._arrivals = LoadCompletions()
        self.step_failed = False
        """Whether a layer-wise load of this step failed, or its forward pass: some of what it was to compute is wrong."""
        self._saver = StoreWorker(pages, options.hook.store_deadline_s, self.tally) if stores else None
        self._answer = StepAnswer()
        self._before: Mark = None
        self._copied: dict[str, int] = {}
        """What ``count_copies`` has counted."""

    def wait_pinned(self) -> None:
        """Waits until what the pages are copied from and to is pinned, where it is to be. Bounded."""
        until_s = time.monotonic() + self._options.device_pin_wait_s
        late = sum(not pages.wait_pinned(max(0.0, until_s - time.monotonic())) for pages in self.pages)
        if late:
            self.tally.add("device_pinned_late", late)
            _log.warning(
                "the arena is not pinned whole after %g s: copies are slower until it is", self._options.device_pin_wait_s
            )

    # ---- loads ----
    def begin_step(self, plan: StepPlan) -> None:
        """A step begins: sees whether the weights are others since the last one.

        Whoever had the pages before that it will load into has computed with them by now, at the latest: loads outside of the
        batch begin behind the step's own computation, for which they need not wait on a device.
        """
        self._keep_up(plan)
        self._before = self.pages[0].mark() if plan.loads else None

    def begin_loads(self, plan: StepPlan) -> None:
        """Begins the loads of a step."""
        after, self._before = self._before, None
        if after is None and plan.loads:
            after = self.pages[0].mark()
        for job in plan.loads:
            (self._in_step if job.layerwise else self._flights).append(self._begin(job, after))

    def _keep_up(self, plan: StepPlan) -> None:
        """Where the weights are others since the last step, what is on its way here is of the old ones."""
        if plan.give_up_saves and self._saver is not None and not self._saver.drain(RESET_GRACE_S):
            self._saver.give_up()
        if plan.weights_check:
            self._check_weights(plan.weights_check)
        if plan.epoch == self._epoch:
            return
        self._outdated = False
        for flight in self._flights:
            flight.cancel_soon()
        old, self.clients = self.clients, self._connect(plan.weights_epoch)
        self._epoch = plan.epoch
        if self._saver is not None:
            self._saver.retire(old)
        else:
            for client in old:
                client.close()

    def _check_weights(self, check: int) -> None:
        """Digest the weights anew: a reset of the engine's cache often follows a change."""
        digest = self.digest_weights()
        if digest != self._digest:
            _log.info("weights changed: digest %s (check=%d)", digest, check)
            self._digest, self._outdated, self._answer.weights_changed = digest, True, True
        self._answer.weights[check, self._rank] = digest

    def _begin(self, job: LoadJob, after: Mark) -> InflightLoad:
        parts = []
        for part in job.groups:
            client, pages = self.clients[part.group], self.pages[part.group]
            handle = None
            if self._outdated:
                parts.append(InflightGroupLoad(part, None, pages))
                continue
            try:
                handle = client.start_load(
                    part.lookups[client.spec.namespace],
                    pages.buffer(part.block_ids, after),
                    deadline_s=self._options.hook.load_deadline_s,
                    layerwise=job.layerwise,
                    paths=job.paths,
                )
            except (KVStoreError, KeyError):  # a scheduler and a worker of different minds: the pages count as not loaded
                self.tally.add("bugs")
                _log.exception("a load could not begin: it counts as failed")
            parts.append(InflightGroupLoad(part, handle, pages))
        return InflightLoad(job.request_id, parts)

    def wait_layer(self, name: str) -> None:
        """Waits until a layer of this step's layer-wise loads has arrived."""
        if not self._in_step:
            return
        place = self.place.get(name)
        if place is None:
            return
        for flight in self._in_step:
            for part in flight.parts:
                if part.group == place[0]:
                    part.wait_layer(place[1])

    def end_forward(self, plan: StepPlan, *, computed: bool = True) -> None:
        """The forward pass of a step, if it had one, is over: its blocks are complete, if it has ``computed`` them."""
        self.step_failed = not computed or self._outdated
        for flight in self._in_step:
            missing = [page for part in flight.parts for page in part.end_in_step(self.tally)]
            self._arrivals.missing.update(missing)
            self.step_failed |= bool(missing)
        self._in_step = []
        failed = self.step_failed
        if not plan.saves:
            return
        if self._saver is not None and not failed:
            unsure = _of_changed_adapters(plan.saves)
            if unsure:
                self.tally.add("stores_unsure", len(unsure))
                self._answer.merge(StepAnswer(dict.fromkeys(unsure, 1), unsure))
            jobs = [job for job in plan.saves if job.job_id not in unsure]
            self._saver.add(plan.chain, jobs, self.clients, self.pages[0].mark())
            return
        self._answer.merge(
            StepAnswer({job.job_id: 1 for job in plan.saves}, {job.job_id for job in plan.saves} if failed else set())
        )

    def arrivals(self, plan: StepPlan, finished: set[str]) -> LoadCompletions:
        """Loads that have ended since the last call.

        Args:
            plan: this step's; one without tokens may wait a moment for something to end.
            finished: requests that nobody wants any more: their loads are given up.
        """
        for flight in self._flights:
            if flight.request_id in finished:
                self.tally.add("loads_aborted")
                flight.cancel_soon()
        if not plan.has_tokens:
            self._rest()
        for flight in [flight for flight in self._flights if flight.done]:
            self._flights.remove(flight)
            missing = [page for part in flight.parts for page in part.end(self.tally)]
            self._arrivals.received.add(flight.request_id)
            if missing:
                self._arrivals.failed.add(flight.request_id)
                self._arrivals.missing.update(missing)
        found, self._arrivals = self._arrivals, LoadCompletions()
        return found

    def _rest(self) -> None:
        """An engine without tokens to compute steps again and again until loads and stores are over: not too fast."""
        unfinished = next((part for flight in self._flights for part in flight.parts if not part.done), None)
        if unfinished is not None:
            unfinished.wait(self._options.idle_wait_s)
        elif not self._flights and self._saver is not None:
            self._saver.wait(self._options.idle_wait_s)

    # ---- stores ----
    def answer(self) -> StepAnswer | None:
        """What has been stored since the last call; None: nothing."""
        if self._saver is not None:
            self._answer.merge(self._saver.take())
        if not self._answer:
            return None
        answer, self._answer = self._answer, StepAnswer()
        return answer

    def hand_back(self, grace_s: float, timeout_s: float) -> StepAnswer:
        """Ends the stores under way, so that their pages are free: what is done by itself within a moment, and gives up the rest.

        Args:
            grace_s: that moment.
            timeout_s: how long it may take then until nothing reads the pages.

        Returns:
            What has ended; the rest will, later.
        """
        if self._saver is not None:
            if not self._saver.drain(grace_s):
                self._saver.give_up()
                self._saver.drain(timeout_s)
            self._answer.merge(self._saver.take())
        answer, self._answer = self._answer, StepAnswer()
        return answer

    def count_copies(self) -> None:
        """Counts what the copies of a device have done since the last call."""
        totals: dict[str, int] = {}
        for pages in self.pages:
            for name, count in pages.counts().items():
                totals[name] = totals.get(name, 0) + count
        for name, total in totals.items():
            if more := total - self._copied.get(name, 0):
                self.tally.add(name, more)
        self._copied = totals

    @property
    def client_stats(self) -> dict[str, int]:
        """Totals of the clients of this epoch, added up."""
        totals: dict[str, int] = {}
        for client in self.clients:
            for name, value in client.stats().items():
                totals[name] = totals.get(name, 0) + value
        return totals

    def close(self) -> None:
        """Ends loads and stores under way."""
        for flight in (*self._flights, *self._in_step):
            flight.cancel()
        if self._saver is not None:
            self._saver.close()
        for client in self.clients:
            client.close()


def _of_changed_adapters(jobs: Sequence[SaveJob]) -> set[int]:
    """Jobs whose blocks may be of other weights than their keys say: the engine may have read the adapter anew."""
    adapters = {id(job.adapter): job.adapter for job in jobs if job.adapter is not None}
    changed = {at for at, adapter in adapters.items() if not adapter.unchanged()}
    return {job.job_id for job in jobs if id(job.adapter) in changed}


def _count_load(tally: ConnectorCounters, result: LoadResult) -> None:
    tally.add("load_blocks", result.hit_blocks)
    tally.add("load_bytes", result.bytes_loaded)
    tally.add("load_seconds", result.seconds)
    for tier, size in result.bytes_by_tier.items():
        if tier in _TIER_COUNTERS:
            tally.add(_TIER_COUNTERS[tier], size)
    for path, size in result.bytes_by_path.items():
        tally.add(f"load_{path}_path_bytes", size)
