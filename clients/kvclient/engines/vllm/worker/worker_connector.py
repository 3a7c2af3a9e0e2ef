"""Loads and stores of a worker's pages, in the background. No vLLM types.

* An asynchronous load runs in the client's threads. Its end is reported once, with the pages that were not filled.
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

from kvclient import KVClient, KVStoreError, LoadHandle, LoadResult, ReadAhead, Tier
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.identity.kv_groups import GroupBlocks
from kvclient.engines.vllm.memory.pages import Mark, Pages
from kvclient.engines.vllm.options import RESET_GRACE_S, ConnectorOptions
from kvclient.engines.vllm.plan import READ_AHEAD_S, GroupLoad, LoadJob, LoadSample, StepPlan, StoreJob, WorkerOutput
from kvclient.engines.vllm.worker.store_worker import StoreWorker
from kvclient.load.accounting import sources_of
from kvstore.core.keys import NamespaceKeyMask
from kvstore.observe.limited_log import LimitedLog

_log = logging.getLogger(__name__)
_limited = LimitedLog(_log)

_TIER_COUNTERS = {Tier.DRAM: "load_dram_bytes", Tier.NVME: "load_nvme_bytes"}

Connect = Callable[[str], Sequence[KVClient]]
"""Makes the clients of a weights epoch, one per group."""


class InflightGroupLoad:
    """A group's part of a load under way.

    Args:
        job: blocks and pages of the load.
        handle: the load; None: it could not even begin.
        pages: of the group.
        probe: the load ends early if its source is slow.
    """

    def __init__(self, job: GroupLoad, handle: LoadHandle | None, pages: Pages, *, probe: bool = False) -> None:
        self.group = job.group
        self._block_ids = job.block_ids
        self._behind = job.behind
        self._handle = handle
        self._pages = pages
        self._missed = "probe_missing_blocks" if probe else "load_missing_blocks"
        """The counter of blocks that are not loaded."""
        self._spoiled = handle is None
        self.result: LoadResult | None = None
        """Result of the load, after its end."""
        self._waited: set[int] = set()

    @property
    def done(self) -> bool:
        """Whether the load of this group has ended."""
        return self._handle is None or self._handle.done

    def wait_layer(self, layer: int) -> None:
        """Wait for a layer. If it is late, the load ends and all of it counts as missing.

        On a device, wait until its copy is submitted; later work of the engine on the device starts after the copy.
        """
        self._waited.add(layer)
        if self._handle is not None and not self._spoiled and not self._handle.wait_layer(layer):
            self._spoiled = True
            self._handle.cancel()  # the engine computes these pages, so nothing else may write to them

    def wait(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for the load to end."""
        if self._handle is not None:
            self._handle.wait_layer(self._pages.shape.layers - 1, timeout_s)

    def cancel(self) -> None:
        """Cancel the load. Afterwards nothing writes to its pages."""
        if self._handle is not None:
            self._handle.cancel()

    def end_in_step(self, counters: ConnectorCounters) -> list[int]:
        """End a layer-wise load; see ``end``. The load fails if the forward pass did not wait for each layer."""
        if not self._spoiled and len(self._waited) < self._pages.shape.layers:
            self._spoiled = True
            counters.add("bugs")
            _log.error("forward pass did not wait for all layers: its load counts as failed")
        return self.end(counters)

    def end(self, counters: ConnectorCounters) -> list[int]:
        """Wait for the end of the load, count it, and return the pages that were not loaded. These pages are cleared."""
        result = self.result = self._handle.result() if self._handle is not None else None
        good = 0 if result is None or self._spoiled else result.hit_blocks
        if result is not None:
            _count_load(counters, result)
        missing = self._block_ids[good:]
        if missing:
            counters.add(self._missed, len(missing))
            self._pages.clear([*missing, *self._behind])
        return missing


@dataclass(slots=True)
class InflightLoad:
    """A load of one request in progress."""

    request_id: str
    parts: list[InflightGroupLoad]

    @property
    def done(self) -> bool:
        """Whether all parts have ended."""
        return all(part.done for part in self.parts)

    def cancel(self) -> None:
        """Cancel all parts."""
        for part in self.parts:
            part.cancel()

    def cancel_soon(self) -> None:
        """The same, without waiting for the pieces that are being moved."""
        if self.done:
            return
        try:
            threading.Thread(target=self.cancel, name="kvstore-cancel", daemon=True).start()
        except RuntimeError:  # no more threads
            self.cancel()


@dataclass(slots=True)
class LoadCompletions:
    """Loads that have ended since the last call.

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
        weights: Callable[[], str] = lambda: "",
        digest: str = "",
        rank: int = 0,
    ) -> None:
        self.counters = ConnectorCounters()
        self._options = options
        self._connect = connect
        self.digest_weights = weights
        self._digest = self._checked_digest = digest
        """Of the weights of the epoch, and of those of the last check."""
        self._rank = rank
        self._outdated = False
        """The weights changed, and the scheduler has not named their epoch yet: nothing is loaded or stored."""
        self._asleep = False
        """The engine has unmapped its KV cache: nothing is loaded or stored."""
        self._epoch = 0
        self.pages = pages
        self.clients = connect(weights_epoch)
        self.layer_positions = {name: (group, at) for group, names in enumerate(layers) for at, name in enumerate(names)}
        self._loads_in_flight: list[InflightLoad] = []
        self._layerwise_loads: list[InflightLoad] = []
        self._ahead: dict[str, ReadAhead] = {}
        """By request: its prefix, which is read ahead."""
        self._completions = LoadCompletions()
        self.step_failed = False
        """A layer-wise load or the forward pass of this step failed, so some computed blocks are wrong."""
        self._store_worker: StoreWorker | None = None
        self._group_blocks = GroupBlocks([client.spec.block_tokens for client in self.clients])
        if stores:
            self._store_worker = StoreWorker(pages, self._group_blocks, options.hook.store_deadline_s, self.counters)
        self._output = WorkerOutput()
        self._unsaved: Sequence[StoreJob] = ()
        """Stores of a step whose end was not reported yet."""
        self._ended_stores: Sequence[StoreJob] = ()
        """Stores of the last step that has ended: their pages may be unpinned, so a second end stores nothing."""
        self._load_mark: Mark = None
        """The mark of ``begin_step``, after which the pages of its loads are free to be written."""
        self._copied: dict[str, int] = {}
        """Totals of the device copies that are already in ``counters``."""

    def wait_pinned(self) -> None:
        """Wait until the host memory of the copies is pinned, if it is to be. Bounded."""
        until_s = time.monotonic() + self._options.device_pin_wait_s
        late = sum(not pages.wait_pinned(max(0.0, until_s - time.monotonic())) for pages in self.pages)
        if late:
            self.counters.add("device_pinned_late", late)
            _log.warning(
                "the arena is not pinned whole after %g s: copies are slower until it is", self._options.device_pin_wait_s
            )

    # ---- loads ----
    def begin_step(self, plan: StepPlan) -> None:
        """Begin a step, and begin its weights epoch if it is a new one.

        Earlier users of the pages to be loaded have submitted their last work by now, so asynchronous loads start after the mark
        made here and need not wait for the computation of this step.
        """
        if self._unsaved is not plan.stores:
            self._end_unsaved()
        self._unsaved = plan.stores if plan.stores is not self._ended_stores else ()
        self._apply_epoch(plan)
        self._output.step = plan.step
        self._read_ahead(plan)
        self._send_hints(plan)
        self._load_mark = self.pages[0].mark() if plan.loads else None

    def _end_unsaved(self) -> None:
        """Answer the stores of a step whose end vLLM did not report, so that their pages are not pinned for ever.

        vLLM's first model runner does so with speculative decoding, on all pipeline ranks but the last.
        """
        if self._unsaved:
            self._ended_stores = self._unsaved
            jobs = {job.job_id for job in self._unsaved}
            self.counters.add("stores_not_begun", len(jobs))
            self._output.merge(WorkerOutput(dict.fromkeys(jobs, 1), jobs))
            _limited.warning("vLLM did not report the end of a step: its blocks are not stored (stores=%d)", len(jobs))

    def begin_loads(self, plan: StepPlan) -> None:
        """Start the loads of a step."""
        after, self._load_mark = self._load_mark, None
        if after is None and plan.loads:
            after = self.pages[0].mark()
        for job in plan.loads:
            (self._layerwise_loads if job.layerwise else self._loads_in_flight).append(self._begin(job, after))

    def _read_ahead(self, plan: StepPlan) -> None:
        for request_id in plan.ahead_ended:
            self._end_ahead(request_id)
        for job in plan.ahead if not self._outdated else ():
            client = self.clients[0]
            try:
                lookup = job.lookups[client.spec.namespace]
                ahead = client.read_ahead(lookup, deadline_s=READ_AHEAD_S, paths=job.paths)
            except Exception:  # noqa: BLE001  # the edge to the engine; for example, both halves disagree about namespaces
                self.counters.add("bugs")
                _log.exception("read ahead not started: unexpected error; the load reads the blocks")
                continue
            if ahead is not None:
                self.counters.add("reads_ahead")
                self._ahead[job.request_id] = ahead

    def _send_hints(self, plan: StepPlan) -> None:
        """Pass hints to the node of this host, in the namespaces of all groups."""
        if self._outdated:
            if plan.hints:
                self.counters.add("hints_refused", len(plan.hints))
                _limited.warning("hints not sent: their keys are of the old weights")
            return
        for job in plan.hints:
            hint = job.hint
            for part, client in enumerate(self.clients):
                keys = NamespaceKeyMask(plan.chain, client.spec.namespace).keys(self._group_blocks.page_keys(part, job.keys))
                try:
                    client.hints.give(hint, keys)
                except KVStoreError as error:  # such as a chain of too many blocks
                    self.counters.add("hints_refused")
                    _limited.warning("hint not sent: session %s: %s", hint.session, error)
                except Exception:  # noqa: BLE001  # the edge to the engine; for example, both halves disagree about namespaces
                    self.counters.add("bugs")
                    _log.exception("hint not sent: session %s, unexpected error", hint.session)

    def _end_ahead(self, request_id: str) -> None:
        """Release what was read ahead for a request."""
        if (ahead := self._ahead.pop(request_id, None)) is not None:
            ahead.end()

    def _apply_epoch(self, plan: StepPlan) -> None:
        """Cancel what belongs to old weights, if the plan begins an epoch."""
        if plan.cancel_stores and self._store_worker is not None and not self._store_worker.drain(RESET_GRACE_S):
            self._store_worker.cancel_pending()
        if plan.weights_check:
            self._check_weights(plan.weights_check)
        if plan.epoch == self._epoch:
            return
        self._outdated = True
        for flight in self._loads_in_flight:
            flight.cancel_soon()
        for request_id in list(self._ahead):
            self._end_ahead(request_id)
        try:
            clients = self._connect(plan.weights_epoch)
        except Exception as error:  # noqa: BLE001  # the edge to the engine; for example, no more threads
            self.counters.add("bugs")
            _limited.warning("weights epoch not begun: nothing is loaded or stored; the next step tries again (error=%s)", error)
            return
        old, self.clients = self.clients, clients
        self._epoch, self._digest, self._outdated = plan.epoch, self._checked_digest, False
        if self._store_worker is not None:
            self._store_worker.retire(old)
        else:
            for client in old:
                client.close()

    def _check_weights(self, check: int) -> None:
        """Digest the weights again: a reset of the engine's cache often follows a change."""
        self._checked_digest = digest = self.digest_weights()
        self._outdated = digest != self._digest
        if self._outdated:
            _log.info("weights changed: digest %s (check=%d)", digest, check)
        self._output.weights[check, self._rank] = digest

    def _begin(self, job: LoadJob, after: Mark) -> InflightLoad:
        parts = []
        ahead = self._ahead.get(job.request_id)
        deadline_s = self._options.hook.load_deadline_s
        if job.limit_s is not None:
            deadline_s = min(deadline_s, job.limit_s)
        for part in job.groups:
            client, pages = self.clients[part.group], self.pages[part.group]
            handle = None
            if self._outdated or self._asleep:
                parts.append(InflightGroupLoad(part, None, pages))
                continue
            try:
                handle = client.start_load(
                    part.lookups[client.spec.namespace],
                    pages.buffer(part.block_ids, after),
                    deadline_s=deadline_s,
                    layerwise=job.layerwise,
                    paths=job.paths if ahead is None else ahead.paths,
                )
            except Exception:  # noqa: BLE001  # the edge to the engine: the pages count as not loaded
                self.counters.add("bugs")
                _log.exception("load not started: unexpected error, counted as failed")
            parts.append(InflightGroupLoad(part, handle, pages, probe=job.limit_s is not None))
        return InflightLoad(job.request_id, parts)

    def wait_layer(self, name: str) -> None:
        """Wait until a layer of this step's layer-wise loads has arrived."""
        if not self._layerwise_loads:
            return
        place = self.layer_positions.get(name)
        if place is None:
            return
        for flight in self._layerwise_loads:
            for part in flight.parts:
                if part.group == place[0]:
                    part.wait_layer(place[1])

    def end_forward(self, plan: StepPlan, *, computed: bool = True) -> None:
        """The forward pass of a step, if it had one, is over: its blocks are complete, if it has ``computed`` them."""
        self._unsaved = ()
        self.step_failed = not computed or self._outdated or self._asleep
        for flight in self._layerwise_loads:
            missing = [page for part in flight.parts for page in part.end_in_step(self.counters)]
            self._sample(flight, layerwise=True)
            self._end_ahead(flight.request_id)
            self._completions.missing.update(missing)
            self.step_failed |= bool(missing)
        self._layerwise_loads = []
        if plan.stores and plan.stores is not self._ended_stores:
            self._ended_stores = plan.stores
            self._submit_stores(plan)

    def _submit_stores(self, plan: StepPlan) -> None:
        """Submit a step's stores, or report them as done without: if the step failed, or another rank stores the same bytes."""
        if self._store_worker is not None and not self.step_failed:
            unsure = _of_changed_adapters(plan.stores)
            if unsure:
                self.counters.add("stores_unsure", len(unsure))
                self._output.merge(WorkerOutput(dict.fromkeys(unsure, 1), unsure))
            jobs = [job for job in plan.stores if job.job_id not in unsure]
            self._store_worker.add(plan.chain, jobs, self.clients, self.pages[0].mark())
            return
        ids = [job.job_id for job in plan.stores]
        self._output.merge(WorkerOutput(dict.fromkeys(ids, 1), set(ids) if self.step_failed else set()))

    def take_completions(self, plan: StepPlan, finished: set[str]) -> LoadCompletions:
        """Return the loads that have ended since the last call.

        Args:
            plan: this step's; one without tokens may wait a moment for something to end.
            finished: requests that have ended: their loads are cancelled.
        """
        for flight in self._loads_in_flight:
            if flight.request_id in finished:
                self.counters.add("loads_aborted")
                flight.cancel_soon()
        if not plan.has_tokens:
            self._wait_idle()
        for flight in [flight for flight in self._loads_in_flight if flight.done]:
            self._loads_in_flight.remove(flight)
            missing = [page for part in flight.parts for page in part.end(self.counters)]
            self._sample(flight, layerwise=False)
            self._end_ahead(flight.request_id)
            self._completions.received.add(flight.request_id)
            if missing:
                self._completions.failed.add(flight.request_id)
                self._completions.missing.update(missing)
        found, self._completions = self._completions, LoadCompletions()
        return found

    def _sample(self, flight: InflightLoad, *, layerwise: bool) -> None:
        """Report how long a load took. Several parts run at once, so that their times say little about each source."""
        if len(flight.parts) == 1 and (result := flight.parts[0].result) is not None:
            local = self.clients[0].context.local
            own_node = (local.node_id or "") if local is not None else ""
            self._output.loads[flight.request_id] = LoadSample(
                sources_of(result), result.seconds, layerwise=layerwise, own_node=own_node
            )

    def _wait_idle(self) -> None:
        """Wait briefly in a step without tokens, so that an engine that waits for loads and stores does not spin."""
        unfinished = next((part for flight in self._loads_in_flight for part in flight.parts if not part.done), None)
        if unfinished is not None:
            unfinished.wait(self._options.idle_wait_s)
        elif not self._loads_in_flight and self._store_worker is not None:
            self._store_worker.wait(self._options.idle_wait_s)

    # ---- stores ----
    def take_output(self) -> WorkerOutput | None:
        """Return the stores that have ended since the last call, and the digest of a weights check; None: nothing."""
        if self._store_worker is not None:
            self._output.merge(self._store_worker.take())
        if not self._output:
            return None
        answer, self._output = self._output, WorkerOutput()
        return answer

    def release_pages(self, grace_s: float, timeout_s: float) -> WorkerOutput:
        """End the stores under way, so that their pages are free: wait for a moment, then cancel the rest.

        Args:
            grace_s: how long stores may go on before they are cancelled.
            timeout_s: how long it may take then until nothing reads the pages.

        Returns:
            The stores that have ended so far.
        """
        if self._store_worker is not None:
            if not self._store_worker.drain(grace_s):
                self._store_worker.cancel_pending()
                self._store_worker.drain(timeout_s)
            self._output.merge(self._store_worker.take())
        answer, self._output = self._output, WorkerOutput()
        return answer

    def suspend(self, timeout_s: float) -> None:
        """Cancel all loads and stores, and wait until nothing accesses the pages, which the engine is about to unmap. Idempotent.

        Args:
            timeout_s: bound of the wait for stores and copies. Loads end by their own bounds.

        Raises:
            Internal: copies did not end in time. The pages must stay mapped; loads and stores go on.
            Unsupported: pages in host memory.
        """
        until_s = time.monotonic() + timeout_s
        before, self._asleep = self._asleep, True
        try:
            for flight in (*self._loads_in_flight, *self._layerwise_loads):
                flight.cancel()
            if self._store_worker is not None:
                self._store_worker.cancel_pending()
                self._store_worker.drain(timeout_s)
            for pages in self.pages:
                pages.suspend(max(0.0, until_s - time.monotonic()))
        except BaseException:
            if not before:
                self.resume()
            raise
        if not before:
            self.counters.add("device_sleeps")

    def resume(self) -> None:
        """Load and store again: the engine has mapped its pages. Idempotent."""
        for pages in self.pages:
            pages.resume()
        self._asleep = False

    def count_device_copies(self) -> None:
        """Count what the copies of a device have done since the last call."""
        totals: dict[str, int] = {}
        for pages in self.pages:
            for name, count in pages.counts().items():
                totals[name] = totals.get(name, 0) + count
        for name, total in totals.items():
            if more := total - self._copied.get(name, 0):
                self.counters.add(name, more)
        self._copied = totals

    def copy_rates(self) -> dict[str, list[tuple[int, str, str, bool, float]]]:
        """Copy strategies of this worker's device, under its rank: group, direction, strategy, whether it is in use, bytes/s.

        Empty for pages in host memory.
        """
        rates = [(group, *rate) for group, pages in enumerate(self.pages) for rate in pages.copy_rates()]
        return {str(self._rank): rates} if rates else {}

    def close(self) -> None:
        """Cancel the loads and stores in progress, and close the clients."""
        for request_id in list(self._ahead):
            self._end_ahead(request_id)
        for flight in (*self._loads_in_flight, *self._layerwise_loads):
            flight.cancel()
        if self._store_worker is not None:
            self._store_worker.close()
        for client in self.clients:
            client.close()
        for pages in self.pages:
            pages.close()


def _of_changed_adapters(jobs: Sequence[StoreJob]) -> set[int]:
    """Jobs whose adapter files changed: the engine may have computed with other weights than the keys name."""
    adapters = {id(job.adapter): job.adapter for job in jobs if job.adapter is not None}
    changed = {at for at, adapter in adapters.items() if not adapter.unchanged()}
    return {job.job_id for job in jobs if id(job.adapter) in changed}


def _count_load(counters: ConnectorCounters, result: LoadResult) -> None:
    counters.add("load_blocks", result.hit_blocks)
    counters.add("load_bytes", result.bytes_loaded)
    counters.add("load_seconds", result.seconds)
    for tier, size in result.bytes_by_tier.items():
        if tier in _TIER_COUNTERS:
            counters.add(_TIER_COUNTERS[tier], size)
    for path, size in result.bytes_by_path.items():
        counters.add(f"load_{path}_path_bytes", size)
