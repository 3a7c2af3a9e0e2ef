"""Connector conformance suite: behaviour of every hook.

Subclass it, name the class ``Test…``, and give it a driver::

    class TestMyHook(ConnectorSuite):
        @classmethod
        def make_driver(cls, folder: Path) -> HookDriver:
            return MyDriver(make_model(folder / "model"))

The main rule: with any failure of the store, the tokens are those of the engine alone. One case rotates bytes with checksums
disabled, to prove that wrong bytes would change the tokens.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.embedded.ports import free_port
from kvstore.testing.connector.conversations import FLUSH_S, MOST_TOKENS, SOON, Conversations, run_seeded
from kvstore.testing.connector.driver import HookDriver, HookEngine, StoreAddress
from kvstore.testing.connector.engine_process import EngineProcess
from kvstore.testing.connector.faulty_store import METADATA, MIB, NODE, FaultyStore, StoreFault

SAMPLE = range(len(StoreFault))
"""Seeds of the runs in the suite: each fault once."""


@dataclass(frozen=True, slots=True)
class Kit:
    """State that the cases of a class share."""

    driver: HookDriver
    talk: Conversations
    folder: Path

    def whole_blocks(self, prompt: tuple[int, ...]) -> int:
        """Tokens of a prompt that a store can help with: whole blocks, and one token is left to compute."""
        return (len(prompt) - 1) // self.driver.block_tokens * self.driver.block_tokens

    def open(self, store: StoreAddress | None, **options: object) -> closing[HookEngine]:
        """An engine in this process, for as long as the block lasts."""
        return closing(self.driver.open(store, options))


class ConnectorSuite(ABC):
    """Behaviour that every hook must have."""

    @classmethod
    @abstractmethod
    def make_driver(cls, folder: Path) -> HookDriver:
        """The hook's driver.

        Args:
            folder: for its model.
        """

    @pytest.fixture(scope="class")
    @classmethod
    def kit(cls, tmp_path_factory: pytest.TempPathFactory) -> Kit:
        """The driver, conversations and the engine's own answers."""
        folder = tmp_path_factory.mktemp("kit")
        driver = cls.make_driver(folder)
        return Kit(driver, Conversations.make(driver), folder)

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[FaultyStore]:
        """A separate store for each case."""
        with FaultyStore(tmp_path / "store") as made:
            yield made

    @pytest.fixture(scope="class")
    @classmethod
    def processes(cls) -> Iterator[list[EngineProcess]]:
        """At most one: the other process of cases that need one, used by all until a case kills it."""
        kept: list[EngineProcess] = []
        yield kept
        for process in kept:
            process.kill()

    @pytest.fixture
    def other(self, kit: Kit, store: FaultyStore, processes: list[EngineProcess]) -> Iterator[EngineProcess]:
        """An engine of another process, with the case's store."""
        if processes:
            processes[0].open(store.address, {})
        else:
            processes.append(EngineProcess(kit.driver, store.address, {}))
        yield processes[0]
        if processes[0].is_ready:
            processes[0].leave()
        else:
            processes.pop().kill()

    # ---- the same tokens ----
    def test_load_of_other_processes_blocks_is_cached_by_engine(self, kit: Kit, store: FaultyStore, other: EngineProcess) -> None:
        kit.talk.ask(other, kit.talk.prompts)
        assert other.flush(FLUSH_S)
        other.leave()
        store.flush()
        with kit.open(store.address) as engine:
            for prompt in kit.talk.prompts:
                (loaded,) = kit.talk.ask(engine, [prompt])
                assert loaded.loaded_tokens == kit.whole_blocks(prompt)
                kit.talk.ask(engine, [prompt])  # whatever the engine itself keeps
                engine.forget()
            kit.talk.ask(engine, kit.talk.prompts)

    @pytest.mark.parametrize("restarted", [(NODE,), (METADATA,), (METADATA, NODE)], ids=lambda names: "+".join(names))
    def test_load_engine_restarted_is_cached(self, kit: Kit, store: FaultyStore, restarted: tuple[str, ...]) -> None:
        prompts = kit.talk.prompts[:8]
        with kit.open(store.address) as engine:
            kit.talk.ask(engine, prompts)
            assert engine.flush(FLUSH_S)
            store.flush()
            for name in restarted:
                store.restart(name)
            engine.forget()
            kit.talk.ask(engine, prompts)
        longest = max(prompts, key=len)
        with kit.open(store.address) as engine:
            assert kit.talk.ask(engine, [longest])[0].loaded_tokens == kit.whole_blocks(longest)

    def test_engines_concurrent_compute_the_same(self, kit: Kit, store: FaultyStore, other: EngineProcess) -> None:
        with kit.open(store.address) as engine:
            for turn in range(4):
                theirs = kit.talk.some(2 * turn, 6)
                other.begin("generate", theirs, MOST_TOKENS)
                kit.talk.ask(engine, kit.talk.some(2 * turn + 1, 6))
                kit.talk.check(theirs, other.end())
                other.forget()
                engine.forget()

    # ---- wrong bytes ----
    def test_wrong_bytes_without_checks_change_tokens(self, kit: Kit, store: FaultyStore) -> None:
        """The negative control: with checksums off, bytes in the wrong places change the answer."""
        prompts = [prompt for prompt in kit.talk.prompts if len(prompt) > 4 * kit.driver.block_tokens]
        with kit.open(store.address, verify="never") as engine:
            kit.talk.ask(engine, prompts)
            assert engine.flush(FLUSH_S)
            store.roll_memory()
            engine.forget()
            answers = engine.generate(prompts, MOST_TOKENS)
            assert all(answer.loaded_tokens for answer in answers)
            wrong = [answer.tokens != kit.talk.answers[prompt] for prompt, answer in zip(prompts, answers, strict=True)]
            assert all(wrong)

    def test_wrong_bytes_in_memory_are_recomputed(self, kit: Kit, store: FaultyStore) -> None:
        with kit.open(store.address, verify="always") as engine:
            kit.talk.ask(engine, kit.talk.prompts)
            assert engine.flush(FLUSH_S)
            store.roll_memory()
            engine.forget()
            kit.talk.ask(engine, kit.talk.prompts)

    def test_wrong_bytes_on_disk_are_recomputed(self, kit: Kit, store: FaultyStore) -> None:
        with kit.open(store.address) as engine:
            kit.talk.ask(engine, kit.talk.prompts)
            assert engine.flush(FLUSH_S)
            store.flush()
            store.corrupt_disk(random.Random(0))  # noqa: S311
            store.evict_memory()
            engine.forget()
            kit.talk.ask(engine, kit.talk.prompts)

    # ---- what fails ----
    def test_store_missing_computes_the_same(self, kit: Kit) -> None:
        nobody = StoreAddress(f"127.0.0.1:{free_port()}", "none")
        with kit.open(nobody, **SOON) as engine:
            kit.talk.ask(engine, kit.talk.prompts[:4])
            engine.flush(FLUSH_S)

    def test_engine_killed_during_store_leaves_no_wrong_block(self, kit: Kit, store: FaultyStore, other: EngineProcess) -> None:
        """Nothing half-written is visible, and the others go on."""
        other.begin("generate", kit.talk.prompts, MOST_TOKENS)
        with kit.open(store.address) as engine:
            kit.talk.ask(engine, kit.talk.prompts[:3])
            other.kill()
            for _ in range(2):
                kit.talk.ask(engine, kit.talk.prompts)
                engine.forget()

    def test_store_almost_without_space_computes_the_same(self, kit: Kit, tmp_path: Path) -> None:
        """Blocks are evicted while they are wanted, and the disk is full."""
        with (
            FaultyStore(tmp_path / "small", dram_bytes=4 * MIB, nvme_bytes=4 * MIB) as store,
            kit.open(store.address, **SOON) as engine,
        ):
            for turn in range(3):
                kit.talk.ask(engine, kit.talk.some(turn, len(kit.talk.prompts)))
                engine.forget()

    def test_seeded_faults_during_store_and_load(self, kit: Kit, store: FaultyStore) -> None:
        with kit.open(store.address, **SOON) as engine:
            reports = [run_seeded(seed, engine, store, kit.talk) for seed in SAMPLE]
        assert {report.fault for report in reports} == set(StoreFault)
        assert any(report.loaded_tokens for report in reports)
