"""Conversations for the connector conformance kit, the engine's own answers, and one seeded run of faults."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field

from kvstore.testing.connector.driver import AbortingEngine, EngineAnswer, HookDriver, HookEngine
from kvstore.testing.connector.faulty_store import FaultyStore, StoreFault

PRINTABLE = range(32, 127)
MOST_TOKENS = 12
FLUSH_S = 30.0
SOON: Mapping[str, object] = {
    "lookup_deadline_s": 0.5,
    "load_deadline_s": 1.0,
    "store_deadline_s": 1.0,
    "verify": "always",
}
"""Options of engines in runs with faults: short timeouts, and verification of bytes in memory."""


class WrongTokensError(AssertionError):
    """An engine with a store said something else than the engine alone."""


@dataclass
class Conversations:
    """Prompts with many shared prefixes, and the engine's answers without a store.

    Attributes:
        prompts: token ids.
        answers: answers of the engine alone.
    """

    prompts: list[tuple[int, ...]]
    answers: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def make(cls, driver: HookDriver, seed: int = 0) -> Conversations:
        """Prompts, and the answers of the engine alone, which is opened in this process."""
        made = cls.prompts_for(driver, seed)
        with closing(driver.open(None, {})) as alone:
            for prompt in made.prompts:  # one at a time: an answer must not depend on other requests
                made.answers[prompt] = alone.generate([prompt], MOST_TOKENS)[0].tokens
        return made

    @classmethod
    def prompts_for(cls, driver: HookDriver, seed: int = 0) -> Conversations:
        """Three stems, each with branches that leave it in the middle of a block, at its edge, and one token before and after."""
        dice, block = random.Random(seed), driver.block_tokens  # noqa: S311  # repeatable, not secret
        cuts = (block - 1, block, block + 1, 4 * block, 6 * block + block // 2, 9 * block)
        stems = [dice.choices(PRINTABLE, k=9 * block) for _ in range(3)]
        return cls(
            [tuple(stem[:cut] + dice.choices(PRINTABLE, k=dice.randrange(1, 2 * block))) for stem in stems for cut in cuts]
        )

    def some(self, seed: int, count: int) -> list[tuple[int, ...]]:
        """Some of the prompts, in some order."""
        return random.Random(seed).sample(self.prompts, count)  # noqa: S311

    def ask(self, engine: HookEngine, prompts: Sequence[tuple[int, ...]]) -> list[EngineAnswer]:
        """Ask all conversations at once.

        Raises:
            WrongTokensError: it says something else than the engine alone.
        """
        answers = engine.generate(prompts, MOST_TOKENS)
        self.check(prompts, answers)
        return answers

    def check(self, prompts: Sequence[tuple[int, ...]], answers: Sequence[EngineAnswer]) -> None:
        """Whether the answers are right.

        Raises:
            WrongTokensError: they are not.
        """
        for prompt, answer in zip(prompts, answers, strict=True):
            if answer.tokens != self.answers[prompt]:
                raise WrongTokensError(
                    f"to a prompt of {len(prompt)} tokens, {answer.loaded_tokens} of them loaded: "
                    f"{answer.tokens} instead of {self.answers[prompt]}"
                )


@dataclass(frozen=True, slots=True)
class RunReport:
    """Report of one seeded run.

    Attributes:
        seed: its seed.
        fault: the fault.
        during: whether the fault occurred while the engine worked, or before.
        loaded_tokens: tokens loaded from the store.
        asked: number of prompts.
        aborted: number of further prompts that were aborted.
    """

    seed: int
    fault: StoreFault
    during: bool
    loaded_tokens: int
    asked: int
    aborted: int


def run_seeded(seed: int, engine: HookEngine, store: FaultyStore, talk: Conversations) -> RunReport:
    """Do one run: store and load prompts with a fault before or during it, and repair the fault. The tokens must always be right.

    If the engine can abort requests, some are aborted between the others, also while the fault lasts.

    Raises:
        WrongTokensError: the tokens are wrong.
    """
    dice = random.Random(seed)  # noqa: S311
    fault = list(StoreFault)[seed % len(StoreFault)]
    during = dice.random() < _DURING
    loaded = asked = aborted = 0
    aborts = random.Random(seed + 2)  # noqa: S311  # separate, so that engines without aborts have the same runs

    def ask() -> None:
        nonlocal loaded, asked, aborted
        if isinstance(engine, AbortingEngine) and aborts.random() < _ABORTED:
            dropped = aborts.sample(talk.prompts, aborts.randint(1, 3))
            engine.abort(dropped, MOST_TOKENS, aborts.randint(0, _MOST_STEPS))
            aborted += len(dropped)
        prompts = dice.sample(talk.prompts, dice.randint(1, 4))
        answers = talk.ask(engine, prompts)
        loaded += sum(answer.loaded_tokens for answer in answers)
        asked += len(prompts)

    ask()
    if dice.random() < _FLUSHED:
        engine.flush(FLUSH_S)
        store.flush()
    if dice.random() < _FORGOTTEN:
        engine.forget()
    strikes = random.Random(seed + 1)  # noqa: S311  # drawn from in another thread
    if during:
        after_s = dice.uniform(0, _WORK_S)
        with ThreadPoolExecutor(1) as other:
            striking = other.submit(_strike_after, after_s, store, fault, strikes)
            ask()
            striking.result()
    else:
        store.strike(fault, strikes)
    ask()
    if dice.random() < _FORGOTTEN:
        engine.forget()
    ask()
    store.heal()
    engine.forget()
    ask()
    return RunReport(seed, fault, during, loaded, asked, aborted)


def _strike_after(seconds: float, store: FaultyStore, fault: StoreFault, dice: random.Random) -> None:
    time.sleep(seconds)  # not to wait for anything: the moment is the seed's
    store.strike(fault, dice)


_DURING = 0.6
_FLUSHED = 0.5
_FORGOTTEN = 0.7
_ABORTED = 0.5
_MOST_STEPS = 6
_WORK_S = 0.08
"""About how long an engine works on some prompts: faults that strike during it do so within this time."""
