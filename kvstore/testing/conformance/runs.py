"""Seeded runs: one engine stores, something goes wrong, another engine loads. Each ends with a verdict."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvstore.core.errors import DeadlineExceeded, Internal, KVStoreError, Unavailable
from kvstore.testing.conformance.engine import TRANSFER, ConnectorDriver
from kvstore.testing.conformance.faults import ConnectorFault
from kvstore.testing.conformance.storage import Storage
from kvstore.testing.conformance.targets import ConnectorTarget
from kvstore.testing.connector.conversations import FLUSH_S, MOST_TOKENS, Conversations, WrongTokensError
from kvstore.testing.connector.engine_process import EngineProcess

_WORK_S: Final = 0.1
"""A fault during a load occurs within this time."""
_DURING: Final = (ConnectorFault.SERVER_KILLED, ConnectorFault.SERVER_STALLED, ConnectorFault.FILES_REMOVED)
"""Faults that occur while an engine loads, in about half of the seeds. All others occur before."""
_BATCH: Final = 4
_NEW_LINK: Final = "model.new"


class RunVerdict(StrEnum):
    """End of a run."""

    RIGHT = "right"
    """All tokens are those of the engine alone."""
    WRONG = "wrong tokens"
    HUNG = "hung"
    CRASHED = "crashed"
    REFUSED = "did not start"
    """The engine ended with an error at its start, while the fault lasted."""
    FAILED = "run failed"
    """This command could not do the run."""


BAD: Final = (RunVerdict.WRONG, RunVerdict.HUNG, RunVerdict.CRASHED, RunVerdict.FAILED)


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run.

    Attributes:
        target: name of the connector.
        fault: the fault.
        seed: its seed.
        verdict: how it ended.
        loaded_tokens: tokens that came from the connector for the first prompt of each engine that loads.
        seconds: duration.
        detail: error, if it did not end well.
    """

    target: str
    fault: ConnectorFault
    seed: int
    verdict: RunVerdict
    loaded_tokens: int
    seconds: float
    detail: str = ""


@dataclass(slots=True)
class Models:
    """Two models with equal configuration and different weights, and the answers of each.

    Attributes:
        driver: opens engines. Its model is a link to the folder of the first one.
        first: folder of the first model.
        talk: its answers.
        other: folder of the second.
        other_talk: its answers.
    """

    driver: ConnectorDriver
    first: Path
    talk: Conversations
    other: Path
    other_talk: Conversations

    @classmethod
    def make(cls, driver: ConnectorDriver, other: Path, scratch: Path) -> Models:
        """Let both models answer without a connector. ``scratch``: a folder for the link."""
        link = scratch / "model"
        link.symlink_to(driver.model.resolve())
        linked = replace(driver, model=link)
        return cls(linked, driver.model.resolve(), _alone(linked), other.resolve(), _alone(replace(driver, model=other)))

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Let the link name the second model."""
        self._link(self.other)
        try:
            yield
        finally:
            self._link(self.first)

    def _link(self, folder: Path) -> None:
        new = self.driver.model.with_name(_NEW_LINK)
        new.symlink_to(folder)
        new.replace(self.driver.model)


def _alone(driver: ConnectorDriver) -> Conversations:
    talk = Conversations.prompts_for(driver)
    process = EngineProcess(driver, None, {})
    try:
        for prompt in talk.prompts:  # one at a time: an answer must not depend on other requests
            talk.answers[prompt] = process.generate([prompt], MOST_TOKENS)[0].tokens
    finally:
        process.close()
    return talk


class Runner:
    """Runs of one target. One process opens all its engines, one after the other, until one hangs or crashes."""

    def __init__(self, target: ConnectorTarget, models: Models, folder: Path) -> None:
        self._target, self._models, self._folder = target, models, folder
        self._process: EngineProcess | None = None
        self._loaded = 0

    def run(self, fault: ConnectorFault, seed: int) -> RunResult:
        """Do one run."""
        began_s = time.monotonic()
        self._loaded = 0
        verdict, detail = RunVerdict.RIGHT, ""
        folder = self._folder / f"{self._target.name}-{fault.name.lower()}-{seed}"
        try:
            with self._target.storage(folder) as storage:
                try:
                    self._go(storage, fault, random.Random(seed))  # noqa: S311  # repeatable, not secret
                finally:
                    self._leave()
        except WrongTokensError as error:
            verdict, detail = RunVerdict.WRONG, str(error)
        except _NotStartedError as error:
            verdict, detail = RunVerdict.REFUSED, str(error)
        except DeadlineExceeded as error:
            verdict, detail = RunVerdict.HUNG, str(error)
        except (Internal, Unavailable) as error:
            verdict, detail = RunVerdict.CRASHED, str(error)
        except (KVStoreError, OSError) as error:
            verdict, detail = RunVerdict.FAILED, repr(error)
        return RunResult(self._target.name, fault, seed, verdict, self._loaded, time.monotonic() - began_s, detail)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _go(self, storage: Storage, fault: ConnectorFault, dice: random.Random) -> None:
        talk = self._models.talk
        engine = self._open(storage)
        if fault is ConnectorFault.ENGINE_KILLED:
            engine.begin("generate", talk.prompts, MOST_TOKENS)
            time.sleep(dice.uniform(0.0, 5 * _WORK_S))
            self._end()
        else:
            self._ask(engine, talk, talk.prompts)
            engine.flush(FLUSH_S)
            engine.leave()
            storage.settle()
        during = fault in _DURING and dice.random() < 0.5
        if fault is ConnectorFault.OTHER_WEIGHTS:
            with self._models.exchanged():
                self._load(storage, self._models.other_talk, dice)
            return
        if fault not in (ConnectorFault.NONE, ConnectorFault.ENGINE_KILLED) and not during:
            storage.strike(fault, dice)
        self._load(storage, talk, dice, fault if during else None, may_refuse=fault is not ConnectorFault.NONE)
        if fault is not ConnectorFault.SERVER_KILLED:
            storage.check()
        storage.heal()
        self._load(storage, talk, dice)

    def _load(
        self,
        storage: Storage,
        talk: Conversations,
        dice: random.Random,
        strikes: ConnectorFault | None = None,
        *,
        may_refuse: bool = False,
    ) -> None:
        """Ask a new engine, whose cache is empty. It may refuse to start with an error while a fault lasts."""
        try:
            engine = self._open(storage)
        except Internal as error:
            self._end()
            if may_refuse:
                raise _NotStartedError(str(error)) from error
            raise
        first = dice.choice([prompt for prompt in talk.prompts if len(prompt) > 2 * self._models.driver.block_tokens])
        [answer] = engine.generate([first], MOST_TOKENS)  # while its own cache is empty
        self._loaded += answer.loaded_tokens
        talk.check([first], [answer])
        if strikes is not None:
            with ThreadPoolExecutor(1) as other:
                striking = other.submit(_strike_later, storage, strikes, random.Random(dice.random()))  # noqa: S311
                self._ask(engine, talk, dice.sample(talk.prompts, len(talk.prompts) // 2))
                striking.result()
        self._ask(engine, talk, dice.sample(talk.prompts, len(talk.prompts) // 2))
        engine.flush(FLUSH_S)
        engine.leave()

    @staticmethod
    def _ask(engine: EngineProcess, talk: Conversations, prompts: Sequence[tuple[int, ...]]) -> None:
        for first in range(0, len(prompts), _BATCH):
            batch = prompts[first : first + _BATCH]
            talk.check(batch, engine.generate(batch, MOST_TOKENS))

    def _open(self, storage: Storage) -> EngineProcess:
        options = {TRANSFER: self._target.transfer_with(storage.values())}
        if self._process is None:
            self._process = EngineProcess(self._models.driver, None, options)
        else:
            self._process.open(None, options)
        return self._process

    def _leave(self) -> None:
        """Leave no engine behind. One that owes an answer is killed."""
        if self._process is None:
            return
        try:
            if self._process.is_ready:
                self._process.leave()
            else:
                self._end()
        except KVStoreError:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None


class _NotStartedError(Exception):
    """An engine did not start."""


def _strike_later(storage: Storage, fault: ConnectorFault, dice: random.Random) -> None:
    time.sleep(dice.uniform(0.0, _WORK_S))  # not to wait for anything: the moment is the seed's
    storage.strike(fault, dice)
