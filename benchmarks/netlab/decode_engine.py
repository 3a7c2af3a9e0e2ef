"""A decode engine in modelled time: takes prompts when they are complete, steps its batch, stores each block that fills."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvclient import KVClient
from kvclient.handoff.receiver import PromptReceiver
from kvstore.core.types import BlockKey
from kvstore.roofline.engine_model import EngineModel
from kvstore.workload.payload import Payloads
from netlab.agents import Chains
from netlab.stepping import Speaker, sleep_until

Bytes = npt.NDArray[np.uint8]
DEADLINE_S = 60.0
MOST_AWAITED = 32
"""Prompts waited for at once, each in a thread."""


@dataclass(slots=True)
class Sequence:
    """A request that is decoded."""

    name: str
    keys: list[BlockKey]
    """Of all blocks that will be full at its end."""
    tokens: int
    """So far: the prompt and the first token, which prefill made, at the beginning."""
    last: int
    """Tokens at its end."""
    joined_s: float = 0.0
    second_s: float = 0.0
    wrong: int = 0
    missed: int = 0
    stored: int = 0
    facts: dict[str, float] = field(default_factory=dict)


class DecodeEngine:
    """Takes ``run`` and ``decode`` commands; arguments as for ``PrefillEngine``."""

    def __init__(self, client: KVClient, chains: Chains, model: EngineModel, settings: dict[str, Any], speaker: Speaker) -> None:
        self._client = client
        self._chains = chains
        self._model = model
        self._speaker = speaker
        self._block_tokens = client.spec.block_tokens
        self._payloads = Payloads(client.spec.block_bytes)
        self._most_blocks = settings["most_blocks"]
        self._space_tokens = max(0, int(model.kv_space_bytes / model.token_bytes))
        self._awaiting = ThreadPoolExecutor(MOST_AWAITED, thread_name_prefix="await")
        self._taking = threading.Lock()
        self._taken = np.ones((self._most_blocks, client.spec.block_bytes), np.uint8)
        self._changed = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._batch: list[Sequence] = []
        self._stopping = False
        self._stores: queue.SimpleQueue[tuple[BlockKey, BlockKey | None, int] | None] = queue.SimpleQueue()
        self._steps = 0
        self._late_s = 0.0
        self._persist = True
        self._not_stored = 0
        self._stepper = threading.Thread(target=self._step_for_ever, name="step", daemon=True)
        self._storer = threading.Thread(target=self._store_for_ever, name="store", daemon=True)
        self._stepper.start()
        self._storer.start()

    def do(self, command: dict[str, Any]) -> None:
        """A command; returns at once."""
        if command["do"] == "run":
            self._steps, self._late_s, self._not_stored = 0, 0.0, 0
            self._persist = command["variant"]["policy"] != "oracle"
            self._speaker.say(did="begun", run=command["run"])
        elif command["do"] == "end":
            self._client.flush(DEADLINE_S)
            figures = {"steps": self._steps, "late_s": self._late_s, "not_stored": self._not_stored}
            self._speaker.say(did="ended", cpu_s=time.process_time(), **figures)
        else:
            keys = self._chains.keys(command["agent"], command["run"], command["prompt"])
            if command["bare"]:
                self._join(self._sequence(command))
                return
            awaited = self._client.await_prompt(keys, deadline_s=DEADLINE_S)
            self._awaiting.submit(self._await, command, keys, awaited)

    def close(self) -> None:
        """Wait for requests under way."""
        self._awaiting.shutdown()
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._stepper.join()
        self._stores.put(None)
        self._storer.join()

    # ---- prompts ----
    def _sequence(self, command: dict[str, Any]) -> Sequence:
        last = command["prompt"] + command["out"]
        full = (last - 1) // self._block_tokens * self._block_tokens
        keys = self._chains.keys(command["agent"], command["run"], full)
        return Sequence(command["id"], keys, command["prompt"] + 1, last)

    def _await(self, command: dict[str, Any], keys: list[BlockKey], awaited: PromptReceiver) -> None:
        """In a thread: the prompt arrives, is taken out of the host's memory and checked."""
        try:
            sequence = self._sequence(command)
            with awaited:
                awaited.wait()
                with self._taking:
                    rows = self._taken[: len(keys)]
                    result = awaited.take(rows)
                    sequence.missed = len(keys) - result.hit_blocks
                    hits = result.hit_blocks
                    sequence.wrong = len(self._payloads.wrong_blocks(b"".join(keys[:hits]), rows[:hits]))
                    rows[:, :64] = 0xA5
            self._join(sequence)
        except Exception as error:  # noqa: BLE001  # the edge of this thread: the coordinator ends the run
            self._speaker.say(did="failed", id=command["id"], error=f"{type(error).__name__}: {error}")

    def _join(self, sequence: Sequence) -> None:
        sequence.joined_s = time.monotonic()
        with self._changed:
            self._waiting.append(sequence)
            self._changed.notify_all()

    # ---- steps ----
    def _step_for_ever(self) -> None:
        due_s = 0.0
        while self._admit():
            batch = self._batch
            seconds = self._model.decode_seconds(len(batch), sum(one.tokens for one in batch))
            now_s = time.monotonic()
            if due_s == 0.0 or now_s - due_s > 1.0:
                due_s = now_s  # it was idle
            due_s += seconds
            sleep_until(due_s)
            self._late_s += max(0.0, time.monotonic() - due_s)
            self._steps += 1
            self._emit(due_s)
            if not self._batch:
                due_s = 0.0

    def _admit(self) -> bool:
        """Let sequences join while there is space; wait for one if the batch is empty. False: the run is over."""
        with self._changed:
            while not self._batch and not self._waiting and not self._stopping:
                self._changed.wait()
            used = sum(one.last for one in self._batch)
            while self._waiting and (not self._batch or used + self._waiting[0].last <= self._space_tokens):
                used += self._waiting[0].last
                self._batch.append(self._waiting.popleft())
            return bool(self._batch) or not self._stopping

    def _emit(self, now_s: float) -> None:
        """One token each."""
        left = []
        for one in self._batch:
            one.tokens += 1
            if not one.second_s:
                one.second_s = now_s
            # the KV of the newest token is computed with the next step
            if (one.tokens - 1) % self._block_tokens == 0 and self._persist:
                at = (one.tokens - 1) // self._block_tokens - 1
                self._stores.put((one.keys[at], one.keys[at - 1] if at else None, at))
                one.stored += 1
            if one.tokens < one.last:
                left.append(one)
                continue
            self._speaker.say(
                did="finished",
                id=one.name,
                joined_s=one.joined_s,
                second_s=one.second_s,
                last_s=now_s,
                wrong=one.wrong,
                missed=one.missed,
                stored=one.stored,
                tokens=one.tokens,
            )
        self._batch = left

    def _store_for_ever(self) -> None:
        """Each block that decode has filled becomes durable."""
        space = np.zeros((1, self._client.spec.block_bytes), np.uint8)
        while (wanted := self._stores.get()) is not None:
            key, parent, depth = wanted
            self._payloads.fill([key], space)
            result = self._client.store([key], space, parent=parent, depth=depth, deadline_s=DEADLINE_S)
            if result.held_blocks != 1:
                self._not_stored += 1
