"""The decode engine's worker: waits for prompts in its host's decode buffer, and copies them into the engine's pages.

The engine's own memory is not needed before a prompt is complete. A prompt that does not come whole in time is given up; what
arrived stays in the store, where an ordinary load finds it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvclient import KVClient, KVStoreError, Unavailable
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.memory.pages import Mark, Pages
from kvclient.engines.vllm.pd.plan import AwaitJob, CopyJob
from kvclient.engines.vllm.worker.worker_connector import LoadCompletions
from kvstore.core.keys import NamespaceKeyMask
from kvstore.observe.limited_log import LimitedLog
from kvstore.process.threads.submission import submit

if TYPE_CHECKING:
    from kvclient.handoff.receiver import PromptReceiver
    from kvclient.options import Verify

_log = logging.getLogger(__name__)
_limited = LimitedLog(_log)
_THREADS = 4
_CANCEL_THREADS = 2


@dataclass(slots=True)
class Prompt:
    """An awaited prompt: one part per group, each from its first needed block."""

    parts: list[PromptReceiver] = field(default_factory=list)
    first_needed: Sequence[int] = ()

    @property
    def done(self) -> bool:
        """Whether the outcome of the prompt is known."""
        return all(part.done for part in self.parts)

    def whole(self) -> bool:
        """Whether the whole prompt has arrived."""
        return bool(self.parts) and all(part.wait(0) for part in self.parts)


class Receiver:
    """Awaited prompts of a worker. Called by the worker's one thread.

    Args:
        pages: memory per group.
        deadline_s: limit of the wait for a prompt.
        verify: when checksums are compared after the copy.
        counters: counts the prompts.
    """

    def __init__(self, pages: Sequence[Pages], deadline_s: float, counters: ConnectorCounters, *, verify: Verify) -> None:
        self._pages = pages
        self._deadline_s = deadline_s
        self._verify = verify
        self._counters = counters
        self._waiting: dict[str, Prompt] = {}
        self._complete: dict[str, Prompt] = {}
        self._copying: dict[str, tuple[CopyJob, Future[list[list[int]]]]] = {}
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvstore-prompt")
        self._cancels = ThreadPoolExecutor(_CANCEL_THREADS, thread_name_prefix="kvstore-prompt-cancel")
        """For prompts that are given up, so that no copy waits for the end of another prompt."""
        self._given_up: list[PromptReceiver] = []
        """Not cancelled yet."""

    def begin(self, jobs: Sequence[AwaitJob], chain: bytes, clients: Sequence[KVClient]) -> None:
        """Start waiting for prompts.

        Args:
            jobs: the awaited prompts.
            chain: the namespace whose chain their keys are of.
            clients: clients per group.
        """
        for job in jobs:
            prompt = Prompt(first_needed=job.first_needed)
            self._waiting[job.request_id] = prompt
            try:
                for client, first in zip(clients, job.first_needed, strict=True):
                    keys = NamespaceKeyMask(chain, client.spec.namespace).keys(job.keys[first:])
                    prompt.parts.append(client.await_prompt(keys, transfer_id=job.transfer_id, deadline_s=self._deadline_s))
            except KVStoreError as error:
                _log.warning("prompt not awaited: request %s (error=%s)", job.request_id, error)
                self._give_up(prompt)
                prompt.parts.clear()

    def take_known(self) -> tuple[set[str], set[str]]:
        """Return the requests whose outcome became known since the last call, and those among them with missing blocks."""
        self._cancel_given_up()
        known, incomplete = set(), set()
        for request_id in [request_id for request_id, prompt in self._waiting.items() if prompt.done]:
            prompt = self._waiting.pop(request_id)
            known.add(request_id)
            if prompt.whole():
                self._counters.add("prompts")
                self._complete[request_id] = prompt
            else:
                self._counters.add("prompts_incomplete")
                incomplete.add(request_id)
                self._give_up(prompt)
        return known, incomplete

    def take(self, jobs: Sequence[CopyJob]) -> None:
        """Copy prompts into pages, in the background."""
        after = self._pages[0].mark() if jobs else None  # submitted work may still use these pages
        for job in jobs:
            prompt = self._complete.pop(job.request_id, None)
            try:
                future = submit(self._threads, self._take, prompt, job, after)
            except Unavailable as error:
                future = Future()
                future.set_exception(error)
                if prompt is not None:
                    self._give_up(prompt)
            future.add_done_callback(self._tell)
            self._copying[job.request_id] = job, future

    def _tell(self, _future: Future[list[list[int]]]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _take(self, prompt: Prompt | None, job: CopyJob, after: Mark) -> list[list[int]]:
        """Copy one prompt. Return the pages that were not filled, per group."""
        missing: list[list[int]] = []
        with ExitStack() as stack:
            parts = prompt.parts if prompt is not None else ()
            for part in parts:
                stack.enter_context(part)
            for group, ids in enumerate(job.block_ids):
                skip = job.first_blocks[group] - prompt.first_needed[group] if prompt is not None else -1
                if prompt is None or skip < 0:
                    self._counters.add("bugs")
                    _log.error("prompt not copied: request %s (it did not arrive, or lacks its beginning)", job.request_id)
                    missing.append(list(ids))
                    continue
                # vLLM gives no page to a last block of one token, which it computes
                buffer = self._pages[group].buffer(ids, after)
                result = parts[group].take(buffer, skip=skip, stop=skip + len(ids), verify=self._verify)
                self._counters.add("prompt_bytes", result.bytes_loaded)
                missing.append(ids[max(0, result.hit_blocks - skip) :])
        return missing

    def take_completions(self) -> LoadCompletions:
        """Return the copies that have ended since the last call."""
        arrivals = LoadCompletions()
        for request_id in [request_id for request_id, (_, future) in self._copying.items() if future.done()]:
            job, future = self._copying.pop(request_id)
            arrivals.received.add(request_id)
            if (error := future.exception()) is not None:
                if isinstance(error, Unavailable):
                    _log.warning("prompt not copied: request %s (error=%s)", request_id, error)
                else:
                    self._counters.add("bugs")
                    _log.error("prompt not copied: request %s, unexpected error", request_id, exc_info=error)
                missing = [list(ids) for ids in job.block_ids]
            else:
                missing = future.result()
            for pages, ids in zip(self._pages, missing, strict=True):
                if ids:
                    pages.clear(ids)  # on the engine's thread, which defines the order of device work
                    arrivals.failed.add(request_id)
                    arrivals.missing.update(ids)
        return arrivals

    def drop(self, request_ids: Sequence[str]) -> None:
        """Stop waiting for prompts. A copy under way continues: it is short, and the engine waits for it."""
        for request_id in request_ids:
            prompt = self._waiting.pop(request_id, None) or self._complete.pop(request_id, None)
            if prompt is not None:
                self._give_up(prompt)

    def _give_up(self, prompt: Prompt) -> None:
        self._given_up += prompt.parts
        self._cancel_given_up()

    def _cancel_given_up(self) -> None:
        """Cancel in the background, as cancelling waits a moment. If no thread can be started, the next step tries again."""
        while self._given_up:
            try:
                submit(self._cancels, self._given_up[-1].cancel)
            except Unavailable as error:
                _limited.warning("prompts not cancelled yet: no thread (prompts=%d, error=%s)", len(self._given_up), error)
                return
            self._given_up.pop()

    @property
    def is_busy(self) -> bool:
        """Whether any prompt is awaited or being copied."""
        return bool(self._waiting or self._copying)

    def wait(self, timeout_s: float) -> None:
        """Wait briefly for an event, if any is pending."""
        if self._copying:
            with self._changed:
                self._changed.wait_for(lambda: any(future.done() for _, future in self._copying.values()), timeout_s)
            return
        unfinished = [part for prompt in self._waiting.values() for part in prompt.parts if not part.done]
        if unfinished and len(unfinished) == sum(len(prompt.parts) for prompt in self._waiting.values()):
            unfinished[0].wait(timeout_s)

    def close(self) -> None:
        """Cancel all awaited prompts and copies."""
        self.drop([*self._waiting, *self._complete])
        self._threads.shutdown(wait=True)
        self._cancels.shutdown(wait=True)
