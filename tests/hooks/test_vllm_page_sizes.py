"""Different pages with a real store, without vLLM: groups whose pages differ in tokens, and parts that differ in bytes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_requests import Pool, Request
from hypothesis import given
from hypothesis import strategies as st

from kvclient import CacheSpec, ClientOptions, InvalidArgument, KeyChain, KVClient
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.identity.keys import RequestKeys
from kvclient.engines.vllm.identity.kv_groups import GroupBlocks
from kvclient.engines.vllm.memory.pages import GroupPages
from kvclient.engines.vllm.options import ConnectorOptions
from kvclient.engines.vllm.plan import StepPlan
from kvclient.engines.vllm.scheduler.prefix_lookup import BackgroundLookup
from kvclient.engines.vllm.scheduler.scheduler_connector import SchedulerConnector
from kvclient.engines.vllm.worker.worker_connector import WorkerConnector
from kvstore.embedded.cluster import LocalCluster, NodeSpec

PAGES = 64
WAIT_S = 20.0
TOKENS = list(range(1000, 1043))


@dataclass(frozen=True)
class Part:
    """Tokens and bytes of a page, and the block table."""

    tokens: int
    page_bytes: int
    table: int
    layers: int = 2


MODELS = {
    "groups of different block size": [Part(8, 256, 0), Part(4, 256, 1), Part(8, 128, 2, layers=1)],
    "page sizes whose multiple is larger": [Part(4, 64, 0), Part(8, 128, 1), Part(12, 192, 2)],
    "an indexer in the group": [Part(4, 1152, 0, layers=3), Part(4, 132, 0, layers=3)],
    "both": [Part(8, 512, 0), Part(8, 96, 0), Part(4, 256, 1)],
}


class Engine:
    """A scheduler and a worker of a scripted engine: the content of a page is a function of the tokens up to its end."""

    def __init__(self, cluster: LocalCluster, parts: Sequence[Part], first_pages: Sequence[int]) -> None:
        self.parts = parts
        hook = HookOptions(metadata=cluster.metadata_address, node=cluster.node("n").local_socket, lookup_deadline_s=5.0)
        specs = [
            CacheSpec("m", one.tokens, layers=one.layers, layer_block_bytes=one.page_bytes, layout=f"part {at}")
            for at, one in enumerate(parts)
        ]
        self.caches = [torch.zeros(one.layers, PAGES, one.page_bytes, dtype=torch.uint8) for one in parts]

        def connect(weights_epoch: str) -> list[KVClient]:
            options = ClientOptions(client_name="rank")
            return [hook.connect(replace(one, weights_epoch=weights_epoch), options) for one in specs]

        options = ConnectorOptions(hook=hook, lookup_wait_ms=100)
        blocks = GroupBlocks([one.tokens for one in parts], [one.table for one in parts])
        pages = [GroupPages(list(cache), PAGES) for cache in self.caches]
        self.worker = WorkerConnector(
            options, connect, "", pages, [[f"{at} {layer}" for layer in range(one.layers)] for at, one in enumerate(parts)]
        )
        self.scheduler = SchedulerConnector(options, blocks)
        self.finder = BackgroundLookup(hook, [[one] for one in specs], ConnectorCounters())
        self.scheduler.connect(self.finder, 0, "")
        self.pool = Pool(PAGES)
        self.scheduler.bind_pool(self.pool)
        tables = {one.table: one.tokens for one in parts}
        self.table_pages = [
            list(range(first, first + -(-len(TOKENS) // tables[table])))
            for table, first in zip(sorted(tables), first_pages, strict=True)
        ]

    def content(self, part: int, page: int) -> np.ndarray:
        """Return the bytes that the engine computes for a page, in all its layers."""
        one = self.parts[part]
        seed = hashlib.sha256(repr((part, TOKENS[: (page + 1) * one.tokens])).encode()).digest()
        generator = np.random.default_rng(int.from_bytes(seed[:8], "little"))
        return generator.integers(0, 256, (one.layers, one.page_bytes), np.uint8)

    def whole_pages(self, part: int, tokens: int) -> list[int]:
        """Page ids of the first tokens."""
        one = self.parts[part]
        return self.table_pages[one.table][: tokens // one.tokens]

    def holds(self, part: int, tokens: int) -> list[bool]:
        """Whether each page of the first tokens has the content that belongs there."""
        return [
            np.array_equal(self.caches[part][:, page].numpy(), self.content(part, at))
            for at, page in enumerate(self.whole_pages(part, tokens))
        ]

    def compute(self, name: str, steps: Sequence[int]) -> None:
        """Compute the tokens of a request in steps, and store them."""
        one = Request(name, TOKENS)
        self.scheduler.on_new_request(one)
        self.until(lambda: self.scheduler.get_num_new_matched_tokens(one, 0)[0] is not None)
        for tokens in steps:
            done = one.num_computed_tokens + tokens
            for part in range(len(self.parts)):
                for at, page in enumerate(self.whole_pages(part, done)):
                    self.caches[part][:, page] = torch.from_numpy(self.content(part, at))
            self.step({name: tokens})
            one.num_computed_tokens = done
        self.until(lambda: not self.scheduler.has_pins)
        assert not self.pool.pinned

    def step(self, scheduled: dict[str, int]) -> None:
        plan = self.scheduler.build_step_plan(scheduled, {}, lambda _: self.table_pages)
        self.worker.begin_loads(plan)
        self.worker.end_forward(plan)

    def until(self, done: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < end_s
            if (answer := self.worker.take_output()) is not None:
                assert not answer.stores_failed
                self.scheduler.on_worker_output(answer)
            time.sleep(0.005)

    def load(self, name: str, least: int) -> tuple[int, set[int]]:
        """Load a request; return the tokens that were offered, and the pages that did not arrive."""
        end_s = time.monotonic() + WAIT_S
        one = Request(name, TOKENS)
        while True:
            self.scheduler.on_new_request(one)
            self.until(lambda: self.scheduler.get_num_new_matched_tokens(one, 0)[0] is not None)
            tokens = self.scheduler.get_num_new_matched_tokens(one, 0)[0]
            assert tokens is not None
            if tokens >= least:
                break
            assert time.monotonic() < end_s, tokens
        self.scheduler.update_state_after_alloc(one, self.table_pages, tokens)
        self.step({})
        while True:
            completions = self.worker.take_completions(StepPlan(), set())
            if completions.received:
                return tokens, completions.missing
            assert time.monotonic() < end_s

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster([NodeSpec("n", dram_bytes=64 << 20)], tmp_path) as started:
        yield started


@pytest.mark.parametrize("parts", MODELS.values(), ids=[name.replace(" ", "-") for name in MODELS])
def test_pages_of_several_sizes_are_loaded_bit_exact(cluster: LocalCluster, parts: list[Part]) -> None:
    """Stored in steps that end within pages, and loaded into other pages."""
    tables = len({one.table for one in parts})
    writer, reader = Engine(cluster, parts, range(1, 61, 20)[:tables]), Engine(cluster, parts, range(41, 0, -20)[:tables])
    writer.compute("w", [7, 11, 25])
    block = GroupBlocks([one.tokens for one in parts]).block_tokens
    wanted = (len(TOKENS) - 1) // block * block
    tokens, missing = reader.load("r", wanted)
    assert (tokens, missing) == (wanted, set())
    assert all(all(reader.holds(part, wanted)) for part in range(len(parts)))
    counts = reader.worker.counters.totals()
    assert counts["load_bytes"] == sum(wanted // one.tokens * one.layers * one.page_bytes for one in parts)
    writer.close()
    reader.close()


def test_part_absent_from_the_store_ends_the_hit(cluster: LocalCluster) -> None:
    """An engine that finds the latents, and not the indexer's pages, computes."""
    parts = MODELS["an indexer in the group"]
    writer, reader = Engine(cluster, parts[:1], [1]), Engine(cluster, parts, [20])
    writer.compute("w", [43])
    assert writer.load("again", 40)[0] == 40
    chain = RequestKeys(reader.finder.chain, {})
    assert reader.finder.begin(chain, TOKENS, 10).result().hit_blocks == 0
    writer.close()
    reader.close()


@given(sizes=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4), smallest=st.integers(1, 4))
def test_page_key_is_that_of_its_last_tokens(sizes: list[int], smallest: int) -> None:
    blocks = GroupBlocks([smallest, *(smallest * size for size in sizes)])
    chain = KeyChain(CacheSpec("m", smallest, layers=1, layer_block_bytes=8))
    tokens = list(range(3 * blocks.block_tokens))
    keys = chain.keys(tokens)
    for part, size in enumerate(blocks.page_tokens):
        ends = range(size, len(tokens) + 1, size)
        assert list(blocks.page_keys(part, keys)) == [chain.keys(tokens[:end])[-1] for end in ends]
        assert len(ends) == 3 * blocks.pages_per_block(part)


def test_page_sizes_without_common_divisor_are_rejected() -> None:
    with pytest.raises(InvalidArgument, match="KVStoreOffloadingConnector"):
        GroupBlocks([32, 48])
