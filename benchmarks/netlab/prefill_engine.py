"""A prefill engine in modelled time: load, compute and hand over, layer by layer or one after the other."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvclient import KVClient, Lookup, Paths
from kvclient.handoff.sender import PromptSender
from kvclient.load.layerwise import LoadHandle
from kvstore.core.types import BlockKey
from kvstore.roofline.engine_model import EngineModel, PrefillChunk
from kvstore.workload.payload import Payloads
from netlab.agents import Chains
from netlab.stepping import Processor, Speaker

Bytes = npt.NDArray[np.uint8]
DEADLINE_S = 60.0
"""Of each load and handoff."""
_AGAIN = 3
"""Number of retries of a handoff that failed for some or all blocks."""


@dataclass(slots=True)
class Job:
    """One request and its result."""

    name: str
    keys: list[BlockKey]
    prompt: int
    expect: int
    """Leading blocks that should be in storage."""
    decode: str
    rows: Bytes
    """Space for all blocks of the prompt, ``[blocks, block_bytes]``."""
    hit: int = 0
    lost: int = 0
    """Blocks that the lookup promised and the load did not bring: computed after all."""
    wrong: int = 0
    started_s: float = 0.0
    loaded_s: float = 0.0
    first_s: float = 0.0
    handed_s: float = 0.0
    sent: int = 0
    again: int = 0
    """Handoffs that had to be tried once more."""
    paths: dict[str, int] | None = None
    error: str | None = None


class PrefillEngine:
    """Takes ``run`` (how requests are to be served from now on) and ``prefill`` commands.

    Args:
        client: on this host.
        chains: keys of prompts.
        model: how long things take.
        settings: of the bed: ``layers_together`` layers of the model are one here.
        speaker: where events go.
    """

    def __init__(self, client: KVClient, chains: Chains, model: EngineModel, settings: dict[str, Any], speaker: Speaker) -> None:
        self._client = client
        self._chains = chains
        self._model = model
        self._speaker = speaker
        self._block_tokens = client.spec.block_tokens
        self._payloads = Payloads(client.spec.block_bytes)
        self._variant: dict[str, Any] = {}
        self._gpu = Processor()
        in_flight = settings["in_flight"]
        self._loads = ThreadPoolExecutor(settings["loads"], thread_name_prefix="load")
        self._jobs = ThreadPoolExecutor(in_flight, thread_name_prefix="prefill")
        self._pushers = ThreadPoolExecutor(in_flight, thread_name_prefix="push")
        # buffers are made once: a load does not include their first touch
        shape = (settings["most_blocks"], client.spec.block_bytes)
        self._rows: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        for _ in range(in_flight):
            self._rows.put(np.ones(shape, np.uint8))

    def do(self, command: dict[str, Any]) -> None:
        """A command; returns at once."""
        if command["do"] == "run":
            self._variant = command["variant"]
            self._gpu = Processor()
            self._speaker.say(did="begun", run=command["run"])
        elif command["do"] == "end":
            figures = {"busy_s": self._gpu.busy_s, "idle_s": self._gpu.idle_s, "late_s": self._gpu.late_s}
            self._speaker.say(did="ended", cpu_s=time.process_time(), **figures)
        else:
            self._jobs.submit(self._serve, command)

    def close(self) -> None:
        """Wait for requests under way."""
        self._jobs.shutdown()
        self._loads.shutdown()
        self._pushers.shutdown()

    def _serve(self, command: dict[str, Any]) -> None:
        whole = self._rows.get()
        try:
            keys = self._chains.keys(command["agent"], command["run"], command["prompt"])
            prompt = command["prompt"]
            job = Job(command["id"], keys, prompt, command["expect"], command["decode"], whole[: len(keys)])
            job.started_s = time.monotonic()
            if self._variant["policy"] == "oracle":
                self._compute_only(job)
            elif self._variant["layerwise"]:
                self._layer_by_layer(job)
            else:
                self._one_after_the_other(job)
            self._tell(job)
        except Exception as error:  # noqa: BLE001  # the edge of this thread: the coordinator ends the run
            self._speaker.say(did="failed", id=command["id"], error=f"{type(error).__name__}: {error}")
        finally:
            self._rows.put(whole)

    def _tell(self, job: Job) -> None:
        self._speaker.say(
            did="prefilled",
            id=job.name,
            blocks=len(job.keys),
            hit=job.hit,
            late=job.expect - job.hit - job.lost,
            lost=job.lost,
            wrong=job.wrong,
            started_s=job.started_s,
            loaded_s=job.loaded_s,
            first_s=job.first_s,
            handed_s=job.handed_s,
            sent=job.sent,
            again=job.again,
            paths=job.paths or {},
            error=job.error,
        )

    # ---- ways to serve ----
    def _compute_only(self, job: Job) -> None:
        """The oracle: no byte is moved."""
        job.hit = job.expect
        job.loaded_s = job.started_s
        [job.first_s] = self._gpu.run(self._seconds(job), job.started_s)
        job.handed_s = job.first_s

    def _one_after_the_other(self, job: Job) -> None:
        """All is loaded, then all is computed, then all is handed over."""
        self._loads.submit(self._load_whole, job).result()
        job.loaded_s = time.monotonic()
        [job.first_s] = self._gpu.run(self._seconds(job), job.loaded_s)
        with self._hand_over(job) as handoff:
            for layer in range(self._client.spec.layers):
                handoff.put_layer(layer, self._layer(job, layer))
            self._commit(job, handoff)

    def _load_whole(self, job: Job) -> None:
        lookup = self._look_up(job)
        if job.hit:
            result = self._client.load(lookup, job.rows[: job.hit], deadline_s=DEADLINE_S, paths=self._paths(job))
            self._account(job, result.hit_blocks, result.bytes_by_path, result.error)

    def _layer_by_layer(self, job: Job) -> None:
        """Each layer is computed when its KV is there, and handed over while the next one is computed."""
        begun: Future[LoadHandle | None] = Future()
        self._loads.submit(self._load_layers, job, begun)
        load = begun.result()
        computed: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        with self._hand_over(job) as handoff:
            pushed = self._pushers.submit(self._push, job, handoff, computed)
            try:
                self._compute_layers(job, load, computed)
            finally:
                computed.put(None)
                pushed.result()
            self._commit(job, handoff)
        if load is not None and not job.lost:
            result = load.result()
            self._account(job, result.hit_blocks, result.bytes_by_path, result.error)

    def _load_layers(self, job: Job, begun: Future[LoadHandle | None]) -> None:
        """Begins a load, and ends with it: so only as many are under way as there are threads, the first that came first."""
        try:
            lookup = self._look_up(job)
            load = None
            if job.hit:
                load = self._client.start_load(lookup, job.rows[: job.hit], deadline_s=DEADLINE_S, paths=self._paths(job))
        except Exception as error:  # noqa: BLE001  # thread edge: the waiter of the load gets the error
            begun.set_exception(error)
            return
        begun.set_result(load)
        if load is not None:
            load.result()

    def _compute_layers(self, job: Job, load: LoadHandle | None, computed: queue.SimpleQueue[int | None]) -> None:
        layers = self._client.spec.layers
        seconds = self._seconds(job) / layers
        ready_s = job.started_s
        layer = 0
        while layer < layers:
            if load is not None and not job.lost and not load.wait_layer(layer, 0.0):
                load.wait_layer(layer)
                ready_s = time.monotonic()
            if load is not None and not job.lost and load.promised_blocks < job.hit:
                result = load.result()  # nothing writes to our memory any more
                self._account(job, result.hit_blocks, result.bytes_by_path, result.error)
                ready_s = time.monotonic()
                seconds = self._seconds(job) / layers
            there = layer + 1
            while there < layers and (load is None or job.lost or load.wait_layer(there, 0.0)):
                there += 1
            if there == layers:
                job.loaded_s = ready_s
            for end_s in self._gpu.run(seconds, ready_s, there - layer):  # what is there is computed without a break
                computed.put(layer)
                layer, job.first_s = layer + 1, end_s
            ready_s = job.first_s

    def _push(self, job: Job, handoff: PromptSender, computed: queue.SimpleQueue[int | None]) -> None:
        while (layer := computed.get()) is not None:
            handoff.put_layer(layer, self._layer(job, layer))

    # ---- steps ----
    def _look_up(self, job: Job) -> Lookup:
        lookup = self._client.lookup(job.keys[: job.expect], deadline_s=DEADLINE_S)
        job.hit = lookup.hit_blocks
        self._payloads.fill(job.keys[job.hit :], job.rows[job.hit :])  # what computing will give
        job.rows[: job.hit, :64] = 0xA5  # what the load does not bring must not look right
        return lookup

    def _paths(self, job: Job) -> Paths:
        variant = self._variant
        return Paths(decode_node=job.decode, policy=variant["policy"], layer_group=variant["layer_group"])

    def _hand_over(self, job: Job) -> PromptSender:
        tail = bool(job.prompt % self._block_tokens)
        return self._client.begin_handoff(job.keys, job.decode, tail=tail, deadline_s=DEADLINE_S)

    def _commit(self, job: Job, handoff: PromptSender) -> None:
        job.sent = handoff.bytes_sent_a_layer * self._client.spec.layers
        result = handoff.commit()
        for _ in range(_AGAIN):  # as engines do: only what the decode host lacks travels
            if result.error is None:
                break
            with self._hand_over(job) as again:
                for layer in range(self._client.spec.layers):
                    again.put_layer(layer, self._layer(job, layer))
                job.sent += again.bytes_sent_a_layer * self._client.spec.layers
                result = again.commit()
            job.again += 1
        job.handed_s = time.monotonic()
        if result.error is not None:
            job.error = str(result.error)

    def _account(self, job: Job, hits: int, paths: dict[str, int], error: object) -> None:
        """The blocks that a load brought; all others are computed."""
        job.paths = dict(paths)
        job.error = job.error or (None if error is None else str(error))
        job.wrong += len(self._payloads.wrong_blocks(_packed(job.keys[:hits]), job.rows[:hits]))
        if hits < job.hit:
            self._payloads.fill(job.keys[hits : job.hit], job.rows[hits : job.hit])
            job.lost, job.hit = job.hit - hits, hits

    def _layer(self, job: Job, layer: int) -> Bytes:
        size = self._client.spec.layer_block_bytes
        return job.rows[:, layer * size : (layer + 1) * size]

    def _seconds(self, job: Job) -> float:
        cached = job.hit * self._block_tokens
        return self._model.prefill_seconds((PrefillChunk(cached, job.prompt - cached),))


def _packed(keys: Sequence[BlockKey]) -> bytes:
    return b"".join(keys)
