"""Prefill engines: batches within the compute quota, in step where experts are shared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvstore.dualpath.compute_budget import PromptChunk, fill_batch
from kvstore.roofline.engine_model import EngineModel, PrefillChunk
from kvstore.simulate.engines.job import Job, SpaceQueue
from kvstore.simulate.network.event_loop import EventLoop

_LOOK_AHEAD = 256
"""Waiting requests that a batch is chosen from: more never fit."""


class PrefillEngine:
    """One engine's queue of requests whose KV is there."""

    def __init__(self, index: int, hbm: SpaceQueue) -> None:
        self.index = index
        self.hbm = hbm
        self.ready: deque[Job] = deque()


class AttentionTime:
    """Attention time as the compute quota asks for it, measured or from the roofline: its unit of work is a second."""

    def __init__(self, engine: EngineModel) -> None:
        self._engine = engine

    def work(self, cached: int, tokens: int) -> float:
        """Return the attention time of one chunk."""
        return self._engine.attention_seconds(PrefillChunk(cached, tokens))

    def seconds(self, work: float) -> float:
        """Return the time of an amount of work, which already is in seconds."""
        return work


class PrefillUnit:
    """Engines that compute in step: a forward pass takes as long as that of the slowest engine.

    Args:
        loop: the event loop.
        engines: of this unit.
        model: their compute times.
        quota_s: attention time of a batch; None: no quota, but at most ``batch_tokens`` new tokens.
        batch_tokens: maximum new tokens of a batch without a quota.
        stream_rate: bytes/s at which KV arrives at one engine while it computes; it bounds the speed of a pass.
        compute: False: passes take no time.
        started: called with each batch at the start of its pass, and the jobs' tokens in it.
        done: called with each job whose last token is computed.
        exchanged: called at the start of a pass with the index of each engine that has a batch, and its new tokens.
    """

    def __init__(
        self,
        loop: EventLoop,
        engines: Sequence[PrefillEngine],
        model: EngineModel,
        *,
        quota_s: float | None,
        batch_tokens: int,
        stream_rate: float,
        token_bytes: float,
        compute: bool,
        started: Callable[[Job], None],
        done: Callable[[Job], None],
        exchanged: Callable[[int, int], None],
    ) -> None:
        self._loop = loop
        self._engines = engines
        self._model = model
        self._attention = AttentionTime(model)
        self._quota_s = quota_s
        self._batch_tokens = batch_tokens
        self._stream = token_bytes / stream_rate
        self._compute = compute
        self._started = started
        self._done = done
        self._exchanged = exchanged
        self._busy = False
        self.busy_s = 0.0
        self.passes = 0
        self.flops = 0.0
        self.hbm_bytes = 0.0

    def add(self, engine: PrefillEngine, job: Job) -> None:
        """A request's KV is there (or begins to come in time for the layers)."""
        engine.ready.append(job)
        if not self._busy:
            self._busy = True
            self._loop.after(0.0, self._pass)

    def _pass(self) -> None:
        running = [(engine.index, batch) for engine in self._engines if (batch := self._batch(engine))]
        if not running:
            self._busy = False
            return
        batches = [batch for _, batch in running]
        tokens = sum(chunk.new for batch in batches for _, chunk in batch)
        seconds = max(self._seconds(batch, tokens) for batch in batches) if self._compute else 0.0
        now = self._loop.now
        self._count(batches, tokens)
        for engine, batch in running:
            self._exchanged(engine, sum(chunk.new for _, chunk in batch))
        for batch in batches:
            for job, chunk in batch:
                if chunk.cached == job.turn.hit:
                    job.prefill_start = now
                job.remaining -= chunk.new
                if not job.remaining:
                    self._started(job)
        self.busy_s += seconds
        self.passes += 1
        self._loop.after(seconds, lambda: self._end(batches))

    def _end(self, batches: list[list[tuple[Job, PrefillChunk]]]) -> None:
        for batch in batches:
            for job, _ in batch:
                if not job.remaining:
                    self._done(job)
        self._pass()

    def _count(self, batches: list[list[tuple[Job, PrefillChunk]]], tokens: int) -> None:
        """Add the work of a pass to the totals, not scaled."""
        for batch in batches:
            chunks = [chunk for _, chunk in batch]
            self.flops += sum(self._model.model.prefill_flops(chunk.cached, chunk.new) for chunk in chunks)
            self.hbm_bytes += self._model.prefill_bytes(chunks, tokens)

    def _seconds(self, batch: list[tuple[Job, PrefillChunk]], group_tokens: int) -> float:
        """Time of computing or of streaming the cached KV, whichever is longer; the first layer's KV arrives before."""
        compute = self._model.prefill_seconds((chunk for _, chunk in batch), group_tokens)
        if not self._stream:
            return compute  # its KV is in HBM
        stream = sum(chunk.cached for _, chunk in batch) * self._stream
        return max(compute, stream) + min(compute, stream) / self._model.model.layers

    def _batch(self, engine: PrefillEngine) -> list[tuple[Job, PrefillChunk]]:
        """Take the requests of the next pass out of the queue. A request that is cut stays at the head of the queue."""
        if not engine.ready:
            return []
        if self._quota_s is None:
            return self._up_to_budget(engine)
        waiting = [engine.ready[i] for i in range(min(len(engine.ready), _LOOK_AHEAD))]
        chunks = fill_batch([PromptChunk(_cached(job), job.remaining) for job in waiting], self._attention, self._quota_s)
        batch = []
        for job, chunk in zip(waiting, chunks, strict=False):
            batch.append((job, PrefillChunk(chunk.cached, chunk.tokens)))
            if chunk.tokens == job.remaining:
                engine.ready.popleft()
        return batch

    def _up_to_budget(self, engine: PrefillEngine) -> list[tuple[Job, PrefillChunk]]:
        """Chunked prefill with a budget of tokens, as engines have it without a quota."""
        batch: list[tuple[Job, PrefillChunk]] = []
        budget = self._batch_tokens
        while engine.ready and budget:
            job = engine.ready[0]
            tokens = min(job.remaining, budget)
            batch.append((job, PrefillChunk(_cached(job), tokens)))
            budget -= tokens
            if tokens == job.remaining:
                engine.ready.popleft()
        return batch


def _cached(job: Job) -> int:
    """Tokens before the next one to compute."""
    return job.prompt_tokens - job.remaining
