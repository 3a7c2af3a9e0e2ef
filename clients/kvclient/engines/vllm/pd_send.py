"""The prefill engine's worker: what a step computes goes to the decode engine's host, layer by layer, while the step computes.

A hand-over has a thread for as long as it lasts; the model's thread only says which layers are complete. Nothing counts on the
other side before the whole step has turned out well: blocks computed after a load that failed are never handed over. Pages are
pinned until their job is answered.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from kvclient import BlockKey, KVClient, KVStoreError
from kvclient.engines.vllm.keys import Masked
from kvclient.engines.vllm.pages import GroupPages
from kvclient.engines.vllm.pd_plan import SendJob
from kvclient.engines.vllm.plan import StepAnswer
from kvclient.engines.vllm.tally import Tally

_log = logging.getLogger(__name__)
_THREADS = 8

Layer = tuple[int, int]
"""Group, and layer within it."""


class Send:
    """One hand-over: ``layer`` and ``end`` by the model's thread, ``run`` by its own."""

    def __init__(self, job: SendJob, chain: bytes, clients: Sequence[KVClient], pages: Sequence[GroupPages]) -> None:
        self.job = job
        self._chain = chain
        self._clients = clients
        self._pages = pages
        self._events: queue.SimpleQueue[Layer | bool] = queue.SimpleQueue()

    def layer(self, layer: Layer) -> None:
        """A layer of this step is complete."""
        self._events.put(layer)

    def end(self, *, good: bool) -> None:
        """The step is over."""
        self._events.put(good)

    def run(self, deadline_s: float, tally: Tally) -> bool:
        """Hands it over; whether the decode host has all of it."""
        job = self.job
        with ExitStack() as stack:
            handoffs = []
            for client, ids in zip(self._clients, job.block_ids, strict=True):
                masked = Masked(self._chain, client.spec.namespace)
                packed = masked.keys(job.keys)
                left_behind = len(job.keys) - len(ids)
                before = job.keys[left_behind - 1] if left_behind else job.parent
                handoff = client.begin_handoff(
                    packed[left_behind * len(job.keys[0]) :],
                    job.decode_node,
                    parent=BlockKey(masked.keys([before])) if before is not None else None,
                    depth=job.first_block + left_behind,
                    tail=job.tail,
                    deadline_s=deadline_s,
                )
                handoffs.append(stack.enter_context(handoff))
            put: set[Layer] = set()
            while not isinstance(event := self._events.get(), bool):
                handoffs[event[0]].put_layer(event[1], self._pages[event[0]].layer_buffer(event[1], job.block_ids[event[0]]))
                put.add(event)
            if not event:
                return False
            for group, pages in enumerate(self._pages):
                for layer in range(pages.shape.layers):
                    if (group, layer) not in put:
                        handoffs[group].put_layer(layer, pages.layer_buffer(layer, job.block_ids[group]))
            results = [handoff.commit() for handoff in handoffs]
        for result in results:
            tally.add("handoff_bytes", result.bytes_stored)
            tally.add("handoff_seconds", result.seconds)
        return all(result.held_blocks == len(ids) for result, ids in zip(results, job.block_ids, strict=True))


class Sender:
    """Hand-overs of a worker. Called by the worker's one thread.

    Args:
        pages: by group: its memory.
        place: where a layer is, by name.
        deadline_s: bound of one hand-over.
        tally: where they are counted.
    """

    def __init__(self, pages: Sequence[GroupPages], place: Mapping[str, Layer], deadline_s: float, tally: Tally) -> None:
        self._pages = pages
        self._place = place
        self._deadline_s = deadline_s
        self._tally = tally
        self._in_step: list[Send] = []
        self._changed = threading.Condition()
        self._answer = StepAnswer()
        self._pending = 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvstore-handoff")

    def begin(self, jobs: Sequence[SendJob], chain: bytes, clients: Sequence[KVClient]) -> None:
        """A step begins that will complete some blocks.

        Args:
            jobs: what it hands over.
            chain: the namespace whose chain the keys are of.
            clients: by group.
        """
        for job in jobs:
            send = Send(job, chain, clients, self._pages)
            self._in_step.append(send)
            with self._changed:
                self._pending += 1
            self._threads.submit(self._run, send)

    def layer(self, name: str) -> None:
        """The forward pass has completed a layer."""
        if self._in_step and (place := self._place.get(name)) is not None:
            for send in self._in_step:
                send.layer(place)

    def end_step(self, *, good: bool) -> None:
        """The forward pass is over. Not ``good``: some of what it computed is wrong."""
        for send in self._in_step:
            adapter = send.job.adapter
            sure = adapter is None or adapter.unchanged()  # else the engine may have computed with others than the keys say
            if not sure:
                self._tally.add("stores_unsure")
            send.end(good=good and sure)
        self._in_step = []

    def _run(self, send: Send) -> None:
        good = False
        try:
            good = send.run(self._deadline_s, self._tally)
        except KVStoreError as error:
            _log.warning("a prompt is not handed over: %s", error)
        except Exception:  # noqa: BLE001  # the edge of a thread: whatever it is, pins must be given back, and the engine goes on
            self._tally.add("bugs")
            _log.exception("a hand-over failed in a way that it should not")
        with self._changed:
            self._pending -= 1
            self._answer.saved[send.job.job_id] = 1
            if not good:
                self._answer.not_saved.add(send.job.job_id)
            self._changed.notify_all()

    def take(self) -> StepAnswer:
        """What is over since the last call."""
        with self._changed:
            answer, self._answer = self._answer, StepAnswer()
            return answer

    @property
    def is_busy(self) -> bool:
        """Whether anything is on its way."""
        return self._pending > 0

    def wait(self, timeout_s: float) -> None:
        """Waits a moment for something to be over, if there is anything."""
        with self._changed:
            self._changed.wait_for(lambda: self._answer.saved or not self._pending, timeout_s)

    def close(self) -> None:
        """Gives up what is under way."""
        self.end_step(good=False)
        self._threads.shutdown(wait=True)
