"""Threads of prefill and decode workers, without vLLM and a store: cancelled prompts, steps without end, no further threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
from engine_requests import SPEC

from kvclient import InvalidArgument, KeyChain, StoreOutcome, StoreResult
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.pd import sender as sender_module
from kvclient.engines.vllm.pd.plan import AbandonJob, AwaitJob, CopyJob, SendJob
from kvclient.engines.vllm.pd.receiver import Receiver
from kvclient.engines.vllm.pd.sender import Sender
from kvclient.engines.vllm.worker.worker_connector import LoadCompletions
from kvstore.core.types import KEY_BYTES
from support.wait import wait_until

CHAIN = SPEC.namespace
KEYS = KeyChain(SPEC).keys(list(range(2 * SPEC.block_tokens)))
LATER_S = 30.0


class FakePages:
    """Pages without memory."""

    shape = SPEC.shape

    def __init__(self) -> None:
        self.cleared: list[int] = []

    def mark(self) -> None:
        return None

    def buffer(self, ids: Sequence[int], _after: None) -> Sequence[int]:
        return ids

    def layer_buffer(self, _layer: int, ids: Sequence[int], _after: None) -> Sequence[int]:
        return ids

    def clear(self, ids: Sequence[int]) -> None:
        self.cleared += ids


class FakePrompt:
    """A prompt that has arrived, or not; its cancel hangs while ``gate`` is closed."""

    def __init__(self, done: bool, blocks: int) -> None:
        self.done, self.cancels, self._blocks = done, 0, blocks
        self.gate = threading.Event()
        self.gate.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, _timeout_s: float) -> bool:
        return self.done

    def take(self, ids: Sequence[int], *, skip: int, stop: int | None = None, **_: object) -> SimpleNamespace:
        if len(ids) != (self._blocks if stop is None else stop) - skip:
            raise InvalidArgument("the block buffer does not fit the requested blocks")
        return SimpleNamespace(bytes_loaded=1, hit_blocks=self._blocks)

    def cancel(self) -> None:
        self.cancels += 1
        assert self.gate.wait(LATER_S)


class FakeClient:
    """Awaits fake prompts, and hands nothing over."""

    spec = SPEC

    def __init__(self, *, arrives: bool = True) -> None:
        self.arrives = arrives
        self.prompts: list[FakePrompt] = []

    def await_prompt(self, keys: bytes, **_: object) -> FakePrompt:
        self.prompts.append(FakePrompt(self.arrives, len(keys) // KEY_BYTES))
        return self.prompts[-1]

    def begin_handoff(self, *_: object, **__: object) -> AbstractContextManager[SimpleNamespace]:
        return nullcontext(SimpleNamespace(put_layer=lambda *_: None))


class SendingClient(FakeClient):
    """Takes each layer once, like the store."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[int] = []
        self.outcomes = [StoreOutcome.STORED]
        """Of each commit; the last one again and again."""

    def put_layer(self, layer: int, _rows: object) -> None:
        if layer in self.layers:
            raise InvalidArgument("the layer was put before, or the handoff has ended", layer=layer)
        self.layers.append(layer)

    def commit(self) -> StoreResult:
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        self.layers.clear()
        return StoreResult(np.full(len(KEYS), outcome, np.uint8))

    def begin_handoff(self, *_: object, **__: object) -> AbstractContextManager[Any]:
        return nullcontext(self)


@pytest.fixture
def counters() -> ConnectorCounters:
    return ConnectorCounters()


@pytest.fixture
def pages() -> FakePages:
    return FakePages()


@pytest.fixture
def receiver(pages: FakePages, counters: ConnectorCounters) -> Iterator[Receiver]:
    made = Receiver([pages], LATER_S, counters, verify="auto")  # type: ignore[list-item]
    yield made
    made.close()


@pytest.fixture
def sender(pages: FakePages, counters: ConnectorCounters) -> Iterator[Sender]:
    made = Sender([pages], {"l0": (0, 0), "l1": (0, 1)}, LATER_S, counters)  # type: ignore[list-item]
    yield made
    made.close()


def refuse_threads(patched: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    patched.setattr(threading.Thread, "start", start)


def awaits(receiver: Receiver, client: Any, *names: str) -> None:
    receiver.begin([AwaitJob(name, KEYS, [0]) for name in names], CHAIN, [client])


def send_job(job_id: int) -> SendJob:
    return SendJob(job_id, "d0", 0, None, KEYS, False, [[1, 2]])


# ---- decode ----
def test_copies_do_not_wait_for_cancelled_prompts(receiver: Receiver) -> None:
    hung, arriving, names = FakeClient(arrives=False), FakeClient(), [f"hung{at}" for at in range(9)]
    awaits(receiver, hung, *names)
    for prompt in hung.prompts:
        prompt.gate.clear()
    receiver.drop(names)
    wait_until(lambda: any(prompt.cancels for prompt in hung.prompts), "a cancel hangs")
    awaits(receiver, arriving, "r")
    assert receiver.take_known() == ({"r"}, set())
    receiver.take([CopyJob("r", [0], [[1, 2]])])
    wait_until(lambda: receiver.take_completions() == LoadCompletions({"r"}), "the prompt is copied")
    for prompt in hung.prompts:
        prompt.gate.set()
    wait_until(lambda: all(prompt.cancels == 1 for prompt in hung.prompts), "all are cancelled")


@pytest.mark.parametrize("ids", [[1], []])
def test_prompt_is_copied_without_its_last_page(ids: list[int], receiver: Receiver, counters: ConnectorCounters) -> None:
    """The engine gives no page to a last block of one token, which it computes."""
    awaits(receiver, FakeClient(), "r")
    assert receiver.take_known() == ({"r"}, set())
    receiver.take([CopyJob("r", [0], [ids])])
    wait_until(lambda: receiver.take_completions() == LoadCompletions({"r"}), "the prompt is copied")
    assert not counters.totals().get("bugs")


def test_prompt_without_a_thread_is_not_copied(receiver: Receiver, pages: FakePages, counters: ConnectorCounters) -> None:
    client = FakeClient()
    awaits(receiver, client, "r")
    assert receiver.take_known() == ({"r"}, set())
    with pytest.MonkeyPatch.context() as patched:
        refuse_threads(patched)
        receiver.take([CopyJob("r", [0], [[1, 2]])])
        assert receiver.take_completions() == LoadCompletions({"r"}, {"r"}, {1, 2})
    assert pages.cleared == [1, 2]
    assert not counters.totals().get("bugs")
    assert not client.prompts[0].cancels
    receiver.take_known()
    wait_until(lambda: client.prompts[0].cancels == 1, "the prompt is cancelled in a later step")


# ---- prefill ----
def test_handoff_of_a_step_without_end_fails(sender: Sender) -> None:
    sender.begin([send_job(1)], CHAIN, [FakeClient()])  # type: ignore[list-item]
    sender.layer("l0")
    sender.end_unfinished()
    sender.begin([send_job(2)], CHAIN, [FakeClient()])  # type: ignore[list-item]
    failed: set[int] = set()

    def seen() -> set[int]:
        failed.update(sender.take().stores_failed)
        return failed

    wait_until(lambda: seen() == {1}, "the first has failed, and the second is under way")
    assert sender.is_busy


@pytest.mark.parametrize("again", [False, True])
def test_handoff_layer_computed_twice_is_sent_once(again: bool, sender: Sender, counters: ConnectorCounters) -> None:
    """Each further draft token runs the layers of the draft model again."""
    client = SendingClient()
    sender.begin([send_job(1)], CHAIN, [client])  # type: ignore[list-item]
    for name in ("l0", "l1", "l1") if again else ("l0", "l1"):
        sender.layer(name)
    sender.end_step(good=True)
    wait_until(lambda: not sender.is_busy, "the handoff is over")
    answer = sender.take()
    assert (answer.stores_done, answer.stores_failed) == ({1: 1}, set())
    assert not counters.totals().get("handoffs_retried"), "a layer that is sent twice fails"


@pytest.mark.parametrize(("later", "failed"), [(StoreOutcome.EXISTS, set()), (StoreOutcome.IN_PROGRESS, {1})])
def test_handoff_counts_no_block_that_another_one_writes(
    later: StoreOutcome, failed: set[int], sender: Sender, counters: ConnectorCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other request has the same prefix. Its engine may die before it has written the blocks."""
    monkeypatch.setattr(sender_module, "_PAUSES_S", (0.01, 0.01))
    client = SendingClient()
    client.outcomes = [StoreOutcome.IN_PROGRESS, later]
    sender.begin([send_job(1)], CHAIN, [client])  # type: ignore[list-item]
    sender.end_step(good=True)
    wait_until(lambda: not sender.is_busy, "the handoff is over")
    assert sender.take().stores_failed == failed
    assert counters.totals()["handoffs_retried"] == (2 if failed else 1)


def test_handoff_without_a_thread_fails(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch)
    sender.begin([send_job(1)], CHAIN, [FakeClient()])  # type: ignore[list-item]
    sender.abandon([AbandonJob("d0", "t1")], [FakeClient()])  # type: ignore[list-item]
    sender.end_step(good=True)
    answer = sender.take()
    assert (answer.stores_done, answer.stores_failed) == ({1: 1}, {1})
    assert not sender.is_busy
