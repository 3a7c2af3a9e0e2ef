"""A vLLM worker as its device sees it: steps are enqueued and never waited for; attention's reads are checked at the end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from deferred import DeferredDevice

from kvclient import BlockKey, CacheSpec, ClientOptions, KVClient
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.identity.keys import RequestKeys
from kvclient.engines.vllm.memory.device_pages import device_pages
from kvclient.engines.vllm.options import ConnectorOptions
from kvclient.engines.vllm.plan import GroupLoad, LoadJob, StepPlan, StoreJob
from kvclient.engines.vllm.scheduler.prefix_lookup import BackgroundLookup
from kvclient.engines.vllm.worker.worker_connector import WorkerConnector
from kvstore.embedded.cluster import LocalCluster
from support.wait import wait_until

BLOCK, LAYERS, PAGES = 4, 3, 24
HEADS, CONTENT = 2, 16
PAGE_BYTES = HEADS * BLOCK * CONTENT * 4
NAMES = [f"l{number}" for number in range(LAYERS)]
WAIT_S = 30.0
STAGING = 3 * PAGE_BYTES
"""Three pages: a larger copy uses the buffer several times."""


def written(number: int, layer: int) -> torch.Tensor:
    """Output of the model for a block, in one layer."""
    return torch.full((HEADS, BLOCK, CONTENT), 100.0 * number + layer + 1)


class Engine:
    """Simulates vLLM's worker: enqueues steps without waiting, and checks at the end what attention read."""

    def __init__(
        self,
        cluster: LocalCluster,
        model: str,
        device: DeferredDevice,
        *,
        node: str = "n",
        strategy: Any = "staged",
        gds: Any = "off",
        load_s: float = 10.0,
        pin_wait_s: float = 30.0,
    ) -> None:
        self.device = device
        self.layers = [torch.zeros(PAGES, BLOCK, HEADS, CONTENT).transpose(1, 2) for _ in range(LAYERS)]
        self.pages = device_pages([self.layers], PAGES, device, strategy=strategy, staging_bytes=STAGING, gds=gds)
        self.spec = CacheSpec(
            model=model,
            block_tokens=BLOCK,
            layers=LAYERS,
            layer_block_bytes=PAGE_BYTES,
            dtype="float32",
            layout="tests",
        )
        hook = HookOptions(
            metadata=cluster.metadata_address, node=cluster.node(node).local_socket, load_deadline_s=load_s, store_deadline_s=10.0
        )
        options = ClientOptions(client_name="late", connect_deadline_s=10.0)

        def connect(epoch: str) -> list[KVClient]:
            spec = replace(self.spec, weights_epoch=epoch)
            return [hook.connect(spec, options, device=self.pages[0].watcher(spec), gds=self.pages[0].disk_reader())]

        self.side = WorkerConnector(ConnectorOptions(hook=hook, device_pin_wait_s=pin_wait_s), connect, "", self.pages, [NAMES])
        self.prefix_lookup = BackgroundLookup(HookOptions(metadata=cluster.metadata_address), [[self.spec]], ConnectorCounters())
        self.wrong: list[str] = []
        self._job = itertools.count(1)

    # ---- the device ----
    def compute(self, pages: Sequence[int], numbers: Sequence[int], layer: int) -> None:
        """One layer of a forward pass fills pages."""

        def work() -> None:
            for page, number in zip(pages, numbers, strict=True):
                self.layers[layer][page] = written(number, layer)

        self.device.run(work)

    def attend(self, pages: Sequence[int], numbers: Sequence[int], layer: int) -> None:
        """Attention reads pages; wrong bytes are recorded."""

        def work() -> None:
            for page, number in zip(pages, numbers, strict=True):
                if not torch.equal(self.layers[layer][page], written(number, layer)):
                    self.wrong.append(f"block {number} in page {page}, layer {layer}")

        self.device.run(work)

    # ---- steps ----
    def tokens(self, numbers: Sequence[int]) -> list[int]:
        return [number * 10 + at for number in numbers for at in range(BLOCK)]

    @property
    def chain(self) -> bytes:
        return self.prefix_lookup.chain.spec.namespace

    def keys(self, numbers: Sequence[int]) -> list[BlockKey]:
        return RequestKeys(self.prefix_lookup.chain, {}).upto(self.tokens(numbers), len(numbers))

    def step(self, pages: Sequence[int], numbers: Sequence[int], *, save: bool = False) -> None:
        """Compute blocks; with ``save``, store them."""
        for layer in range(LAYERS):
            self.compute(pages, numbers, layer)
        jobs = [StoreJob(next(self._job), "r", 0, None, self.keys(numbers), [list(pages)])] if save else []
        self.side.end_forward(StepPlan(chain=self.chain, stores=jobs, has_tokens=True))

    def stored(self, jobs: int = 1) -> set[int]:
        """Wait for the results of a number of stores; returns the failed ones."""
        done: dict[int, int] = {}
        failed: set[int] = set()

        def told() -> bool:
            answer = self.side.take_output()
            if answer is not None:
                done.update(answer.stores_done)
                failed.update(answer.stores_failed)
            return len(done) >= jobs

        wait_until(told, "stores end")
        return failed

    def job(self, pages: Sequence[int], numbers: Sequence[int], *, layerwise: bool, found: int | None = None) -> LoadJob:
        tokens = self.tokens(numbers)
        keys = RequestKeys(self.prefix_lookup.chain, {})
        end_s = time.monotonic() + WAIT_S
        while True:
            future = self.prefix_lookup.begin(keys, tokens, len(numbers))
            wait((future,), WAIT_S)
            got = future.result()
            if got.hit_blocks >= (len(numbers) if found is None else found):
                break
            assert time.monotonic() < end_s, got.hit_blocks
            time.sleep(0.01)
        lookups = {name: lookup.part(0, len(pages)) for name, lookup in got.by_group[0].items()}
        return LoadJob("r", [GroupLoad(0, list(pages), 0, lookups)], layerwise)

    def load(self, pages: Sequence[int], numbers: Sequence[int], job: LoadJob | None = None) -> set[int]:
        """Load outside of the batch, then run a step that uses the pages. Returns the pages that were not loaded."""
        job = job or self.job(pages, numbers, layerwise=False)
        self.side.begin_loads(StepPlan(chain=self.chain, loads=[job]))
        missing: set[int] = set()
        received: set[str] = set()

        def told() -> bool:
            arrivals = self.side.take_completions(StepPlan(has_tokens=True), set())
            missing.update(arrivals.missing)
            received.update(arrivals.received)
            return bool(received)

        wait_until(told, "a load ends")
        good = [(page, number) for page, number in zip(pages, numbers, strict=True) if page not in missing]
        for layer in range(LAYERS):
            self.attend([page for page, _ in good], [number for _, number in good], layer)
        return missing

    def load_in_step(self, pages: Sequence[int], numbers: Sequence[int]) -> set[int]:
        job = self.job(pages, numbers, layerwise=True)
        self.side.begin_loads(StepPlan(chain=self.chain, loads=[job], has_tokens=True))
        for layer in range(LAYERS):
            self.side.wait_layer(NAMES[layer])
            self.attend(pages, numbers, layer)
        self.side.end_forward(StepPlan(has_tokens=True))
        return self.side.take_completions(StepPlan(has_tokens=True), set()).missing

    def read_back(self, numbers: Sequence[int]) -> np.ndarray:
        """Blocks in the store, read by a client without a device."""
        keys = self.keys(numbers)
        rows = np.zeros((len(numbers), LAYERS, self.spec.layer_block_bytes), np.uint8)
        assert self.side.clients[0].load(keys, rows).hit_blocks == len(numbers)
        return rows

    def settled(self) -> list[str]:
        """Run all enqueued work; returns the wrong reads of attention."""
        self.device.run_all()
        return self.wrong

    def close(self) -> None:
        self.side.close()
        self.prefix_lookup.close()


def rows_of(numbers: Sequence[int]) -> np.ndarray:
    """Expected blocks in the store: pages are tokens first."""
    layers = [[written(number, layer).transpose(0, 1).contiguous() for layer in range(LAYERS)] for number in numbers]
    return np.stack([np.stack([one.numpy().view(np.uint8).reshape(-1) for one in block]) for block in layers])
