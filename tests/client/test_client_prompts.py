"""Prompts that are awaited and never arrive: cancelled while they wait, also for a thread, and ended when the client closes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from client_fakes import FakeNode

from kvclient import CacheSpec, DeadlineExceeded, KVClient, Outcome
from support.chains import token_chain

MakeClient = Callable[..., KVClient]

LONG_S = 25.0


def test_prompt_cancelled_without_a_thread_ends_at_once(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    client = make_client(near, part_workers=1)
    first = client.await_prompt(token_chain(spec, 2), transfer_id="first", deadline_s=LONG_S)
    near.wait_called("AwaitPrompt")
    queued = client.await_prompt(token_chain(spec, 2), transfer_id="queued", deadline_s=LONG_S)
    queued.cancel()
    assert queued.done
    assert not queued.wait()
    assert not first.done, "the prompt before it is still awaited"
    first.cancel()
    assert near.names().count("AwaitPrompt") == 1, "a cancelled prompt is never asked for"


def test_prompt_taken_without_a_thread_is_missing(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    client = make_client(near, part_workers=1)
    first = client.await_prompt(token_chain(spec, 2), deadline_s=LONG_S)
    near.wait_called("AwaitPrompt")
    queued = client.await_prompt(token_chain(spec, 2), deadline_s=LONG_S)
    result = queued.take(np.zeros((2, spec.block_bytes), np.uint8))
    assert (result.outcomes == Outcome.UNAVAILABLE).all()
    assert not first.done


def test_closed_client_cancels_awaited_prompts(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    client = make_client(near, part_workers=1)
    prompts = [client.await_prompt(token_chain(spec, 2), transfer_id=f"t{at}", deadline_s=LONG_S) for at in range(3)]
    near.wait_called("AwaitPrompt")
    client.close()
    assert all(prompt.done for prompt in prompts)
    for prompt in prompts:
        result = prompt.take(np.zeros((2, spec.block_bytes), np.uint8))
        assert isinstance(result.error, DeadlineExceeded)
        assert "cancelled by the caller" in str(result.error)
