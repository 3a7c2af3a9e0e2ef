"""The prefill engine's worker: sends computed blocks to the decode engine's host, layer by layer, while the step computes.

A handoff has a thread for as long as it lasts; the model's thread only says which layers are complete. Nothing counts on the
other side before the whole step has turned out well: blocks computed after a load that failed are never handed over. Pages are
pinned until their job is answered: so a handoff that failed, because the other host did not answer for a moment, is tried
again a few times within its deadline, by threads that no first try waits for.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from kvclient import BlockKey, DeadlineExceeded, KVClient, KVStoreError, StoreOutcome, StoreResult, Unavailable
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.memory.pages import Mark, Pages
from kvclient.engines.vllm.pd.plan import AbandonJob, SendJob
from kvclient.engines.vllm.plan import WorkerOutput
from kvstore.core.keys import NamespaceKeyMask
from kvstore.observe.limited_log import LimitedLog
from kvstore.process.threads.submission import submit

if TYPE_CHECKING:
    from kvclient.handoff.sender import PromptSender

_log = logging.getLogger(__name__)
_limited = LimitedLog(_log)
_THREADS = 8
_PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Delays in seconds before each retry."""

Layer = tuple[int, int]
"""Group, and layer within the group."""


class PromptHandoff:
    """One handoff: the model's thread calls ``layer`` and ``end``, other threads ``run`` and ``again``."""

    def __init__(
        self, job: SendJob, chain: bytes, clients: Sequence[KVClient], pages: Sequence[Pages], deadline_s: float
    ) -> None:
        self.job = job
        self.good = False
        """Whether the step succeeded, known after ``run`` has returned; if not, nothing can be handed over."""
        self._chain = chain
        self._clients = clients
        self._pages = pages
        self._events: queue.SimpleQueue[Layer | bool] = queue.SimpleQueue()
        self._marks: dict[Layer, Mark] = {}
        self._end_mark: Mark = None
        """Marks of each computed layer, and of all layers."""
        self._end_s = time.monotonic() + deadline_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self._end_s - time.monotonic())

    def layer(self, layer: Layer, after: Mark) -> None:
        """Record that a layer of this step is complete, at a mark.

        A draft model may compute its layers again, for tokens after the prompt.
        """
        if layer not in self._marks:
            self._marks[layer] = after
            self._events.put(layer)

    def end(self, after: Mark, *, good: bool) -> None:
        """Record that the step has ended, at a mark."""
        self._end_mark = after
        self._events.put(good)

    def run(self, counters: ConnectorCounters) -> bool:
        """Hand over the blocks while the step computes. Return whether the decode host has all of them."""
        with self._handoffs() as handoffs:
            put: set[Layer] = set()
            while not isinstance(event := self._next(), bool):
                self._put(handoffs, event)
                put.add(event)
            self.good = event
            if not event:
                return False
            results = self._commit(handoffs, put, counters)
        return self._all_held(results)

    def _next(self) -> Layer | bool:
        try:
            return self._events.get(timeout=self.left_s)
        except queue.Empty:
            raise DeadlineExceeded("the step that computes a prompt has not ended in time") from None

    def again(self, counters: ConnectorCounters) -> bool:
        """Retry the handoff after the step. Return whether the decode host has all blocks."""
        with self._handoffs() as handoffs:
            results = self._commit(handoffs, set(), counters)
        return self._all_held(results)

    @contextmanager
    def _handoffs(self) -> Iterator[list[PromptSender]]:
        """Begin one handoff per group; leaving the context before their commit cancels them."""
        job = self.job
        with ExitStack() as stack:
            handoffs = []
            for client, ids in zip(self._clients, job.block_ids, strict=True):
                masked = NamespaceKeyMask(self._chain, client.spec.namespace)
                packed = masked.keys(job.keys)
                left_behind = len(job.keys) - len(ids)
                before = job.keys[left_behind - 1] if left_behind else job.parent
                handoff = client.begin_handoff(
                    packed[left_behind * len(job.keys[0]) :],
                    job.decode_node,
                    parent=BlockKey(masked.keys([before])) if before is not None else None,
                    depth=job.first_block + left_behind,
                    tail=job.tail,
                    deadline_s=max(0.001, self.left_s),
                )
                handoffs.append(stack.enter_context(handoff))
            yield handoffs

    def _put(self, handoffs: Sequence[PromptSender], layer: Layer) -> None:
        group, number = layer
        after = self._marks.get(layer, self._end_mark)
        handoffs[group].put_layer(number, self._pages[group].layer_buffer(number, self.job.block_ids[group], after))

    def _commit(self, handoffs: Sequence[PromptSender], put: Collection[Layer], counters: ConnectorCounters) -> list[StoreResult]:
        """Write the layers that are not in ``put`` yet, and commit."""
        for group, pages in enumerate(self._pages):
            for layer in range(pages.shape.layers):
                if (group, layer) not in put:
                    self._put(handoffs, (group, layer))
        results = [handoff.commit() for handoff in handoffs]
        for result in results:
            counters.add("handoff_bytes", result.bytes_stored)
            counters.add("handoff_seconds", result.seconds)
        return results

    def _all_held(self, results: Sequence[StoreResult]) -> bool:
        """Whether the decode host has all blocks. Those that another sender writes do not count: it may fail, or have failed."""
        return all(
            result.error is None and result.held_blocks - result.count(StoreOutcome.IN_PROGRESS) == len(ids)
            for result, ids in zip(results, self.job.block_ids, strict=True)
        )


class Sender:
    """Handoffs of a worker. Called by the worker's one thread.

    Args:
        pages: memory per group.
        layer_positions: group and number of each layer, by its name.
        deadline_s: deadline of one handoff, including retries.
        counters: the connector's counters.
    """

    def __init__(
        self, pages: Sequence[Pages], layer_positions: Mapping[str, Layer], deadline_s: float, counters: ConnectorCounters
    ) -> None:
        self._pages = pages
        self._layer_positions = layer_positions
        self._deadline_s = deadline_s
        self._counters = counters
        self._step_handoffs: list[PromptHandoff] = []
        self._changed = threading.Condition()
        self._answer = WorkerOutput()
        self._pending = 0
        self._closing = threading.Event()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvstore-handoff")
        self._later = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvstore-handoff-again")

    def begin(self, jobs: Sequence[SendJob], chain: bytes, clients: Sequence[KVClient]) -> None:
        """Begin a step that completes some blocks.

        Args:
            jobs: its handoffs.
            chain: the namespace whose chain the keys are of.
            clients: clients per group.
        """
        for job in jobs:
            send = PromptHandoff(job, chain, clients, self._pages, self._deadline_s)
            with self._changed:
                self._pending += 1
            try:
                submit(self._threads, self._run, send)
            except Unavailable as error:
                _log.warning("prompt not handed over (error=%s)", error)
                self._over(send, good=False)
            else:
                self._step_handoffs.append(send)

    def end_unfinished(self) -> None:
        """End the handoffs of a step whose end vLLM did not report, as failed: none gets the layers of a later step."""
        if self._step_handoffs:
            _limited.warning("vLLM did not report the end of a step (handoffs=%d)", len(self._step_handoffs))
            self.end_step(good=False)

    def layer(self, name: str) -> None:
        """Record that the forward pass has completed a layer."""
        if self._step_handoffs and (position := self._layer_positions.get(name)) is not None:
            after = self._pages[position[0]].mark()
            for send in self._step_handoffs:
                send.layer(position, after)

    def end_step(self, *, good: bool) -> None:
        """End the handoffs of a step; not ``good``: some of its blocks are wrong."""
        sends, self._step_handoffs = self._step_handoffs, []
        after: Mark = None
        computed = False
        try:
            if good and sends:
                after = self._pages[0].mark()  # fails if the device failed; the handoffs must still end
            computed = good
        finally:
            for send in sends:
                adapter = send.job.adapter
                # otherwise the blocks may come from other weights than the keys say
                sure = adapter is None or adapter.unchanged()
                if not sure:
                    self._counters.add("stores_unsure")
                send.end(after, good=computed and sure)

    def abandon(self, jobs: Sequence[AbandonJob], clients: Sequence[KVClient]) -> None:
        """Tell decode hosts, in the background, that prompts will not arrive completely."""
        for job in jobs:
            try:
                submit(self._later, self._tell, job, clients[0])
            except Unavailable as error:
                _log.warning("abandoned prompt not reported: decode node %s (error=%s)", job.decode_node, error)

    def _tell(self, job: AbandonJob, client: KVClient) -> None:
        try:
            client.abandon_prompt(job.transfer_id, job.decode_node, deadline_s=self._deadline_s)
        except KVStoreError as error:
            _log.warning("abandoned prompt not reported: decode node %s (error=%s)", job.decode_node, error)

    def _run(self, send: PromptHandoff) -> None:
        done = self._tried(send.run)
        if not done and send.good and not self._closing.is_set():
            try:
                submit(self._later, self._retry, send)
            except Unavailable as error:
                _log.warning("handoff not retried: decode node %s (error=%s)", send.job.decode_node, error)
            else:
                return
        self._over(send, good=done)

    def _retry(self, send: PromptHandoff) -> None:
        done = False
        for pause_s in _PAUSES_S:
            if self._closing.wait(min(pause_s, send.left_s)) or not send.left_s:
                break
            self._counters.add("handoffs_retried")
            if done := self._tried(send.again):
                break
        self._over(send, good=done)

    def _tried(self, attempt: Callable[[ConnectorCounters], bool]) -> bool:
        try:
            return attempt(self._counters)
        except KVStoreError as error:
            _log.warning("prompt not handed over (error=%s)", error)
        except Exception:  # noqa: BLE001  # top of a thread: pins must be released after any error
            self._counters.add("bugs")
            _log.exception("handoff failed: unexpected error")
        return False

    def _over(self, send: PromptHandoff, *, good: bool) -> None:
        with self._changed:
            self._pending -= 1
            self._answer.stores_done[send.job.job_id] = 1
            if not good:
                self._answer.stores_failed.add(send.job.job_id)
            self._changed.notify_all()

    def take(self) -> WorkerOutput:
        """Return the handoffs that have ended since the last call."""
        with self._changed:
            answer, self._answer = self._answer, WorkerOutput()
            return answer

    @property
    def is_busy(self) -> bool:
        """Whether handoffs are under way."""
        return self._pending > 0

    def wait(self, timeout_s: float) -> None:
        """Wait briefly for a handoff to end, if any is pending."""
        with self._changed:
            self._changed.wait_for(lambda: self._answer.stores_done or not self._pending, timeout_s)

    def close(self) -> None:
        """Cancel all handoffs."""
        self._closing.set()
        self.end_step(good=False)
        self._threads.shutdown(wait=True)
        self._later.shutdown(wait=True, cancel_futures=True)
