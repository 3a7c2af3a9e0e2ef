"""Parts of ``gpu_copies.py`` that go through ``KVClient``: loads and stores as an engine makes them, and steps beside loads.

The store is real: a metadata server and a node as processes, and the arena in shared memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

import harness
from harness import Figure, Reference, Target
from kvclient import BlockKey, InvalidArgument, KVClient, Lookup
from kvclient.device.copier import DeviceCopier
from kvstore.core.types import Tier
from kvstore.embedded.cluster import NodeSpec
from rig import OPTIONS, NodeControl, cluster, found, loaded, space_for, stored
from rig.gpu_bed import LLAMA, PIN_S, TINY, WAYS, Case, filled, free, notes, synchronize, timed

STEP_PRODUCTS, STEP_SIDE, STEP_TOKENS = 64, 4096, 32
"""A step like that of a small model that decodes: products with the weights for a batch of 32, of some 2 ms."""


class Engine:
    """A KV cache with pages for the blocks twice, and a client of a real store."""

    def __init__(self, stack: ExitStack, options: harness.Options, way: str, blocks: int) -> None:
        self.device: torch.device = options.extra.device
        self.case = Case(TINY if options.mode == "smoke" else LLAMA, "page")
        self.blocks = blocks
        self.nbytes = blocks * self.case.block_bytes
        free(self.device)
        self.cache = self.case.cache(2 * blocks, self.device)
        for number, layer in enumerate(self.cache.layers):
            layer.tensor.copy_(filled(layer.tensor, number))
        self.copier = DeviceCopier(self.cache, strategy=way)  # type: ignore[arg-type]
        node = NodeSpec("bench", dram_bytes=space_for(blocks, self.case.block_bytes))
        store = stack.enter_context(cluster(node, options.scratch))
        bench = store.node("bench")
        self._control = NodeControl(bench.address)
        stack.callback(self._control.close)
        self.client = stack.enter_context(
            KVClient.connect(
                store.metadata_address,
                self.copier.spec("benchmark", self.case.tokens),
                node=bench.local_socket,
                options=OPTIONS,
                device=self.copier,
            )
        )
        assert self.copier.wait_pinned(PIN_S)
        self._random = np.random.default_rng(options.seed)
        pages = self._random.permutation(2 * blocks).tolist()
        self.pages, self.others = pages[:blocks], pages[blocks:]
        self._held = 0

    def store(self) -> tuple[list[BlockKey], float]:
        """Store blocks that the store does not hold. Returns their keys and the seconds."""
        self._control.empty(Tier.DRAM, self._held)
        tokens = self._random.integers(0, 1 << 32, self.blocks * self.case.tokens, np.uint32)
        keys = self.client.keys(tokens)
        elapsed_s = timed(self.device, lambda: stored(self.client.store(keys, self.copier.blocks(self.pages))))
        self._held = self.blocks
        return keys, elapsed_s

    def load(self, lookup: Lookup) -> None:
        """Load the blocks into other pages."""
        loaded(self.client.load(lookup, self.copier.blocks(self.others)), Tier.DRAM)

    def check(self) -> None:
        """Check that every loaded page equals the stored one."""
        for number, layer in enumerate(self.cache.layers):
            words = layer.tensor.view(torch.int16)
            assert torch.equal(words[self.others], words[self.pages]), f"layer {number}"

    def forget(self) -> None:
        """Fill the pages of loads with zeros."""
        for layer in self.cache.layers:
            layer.tensor[self.others] = 0


@contextmanager
def engine(options: harness.Options, way: str, blocks: int) -> Iterator[Engine | None]:
    """Start an engine with its store, or return None if this copy method is not supported."""
    with ExitStack() as stack:
        try:
            made = Engine(stack, options, way, blocks)
        except InvalidArgument as error:
            print(f"{way}: not measured: {error}", file=sys.stderr)
            yield None
            return
        yield made


def serve(options: harness.Options) -> None:
    """Measure ``KVClient.load`` and ``KVClient.store`` of pages, and steps in one thread beside loads in another."""
    for way in options.pick(full=WAYS, quick=WAYS, smoke=("batched",)):
        with engine(options, way, options.pick(full=1000, quick=400, smoke=8)) as made:
            if made is not None:
                _rates(options, made, way)
                _steps(options, made, way)


def _rates(options: harness.Options, made: Engine, way: str) -> None:
    """Loads and stores with their checksums, against one plain copy."""
    device, size = made.device, made.nbytes / 1e9
    host = torch.empty(made.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    space = torch.empty_like(host, device=device)
    keys: list[BlockKey] = []

    def store() -> float:
        keys[:], elapsed_s = made.store()
        return size / elapsed_s

    def load() -> float:
        lookup = found(made.client, keys)
        made.forget()
        rate = size / timed(device, lambda: made.load(lookup))
        made.check()
        return rate

    def to_device() -> float:
        return size / timed(device, lambda: space.copy_(host, non_blocking=True))

    def to_host() -> float:
        return size / timed(device, lambda: host.copy_(space, non_blocking=True))

    store()  # a load in the first round needs blocks
    samples = harness.interleave({"store": store, "load": load, "to host": to_host, "to device": to_device}, options.repetitions)
    stats = made.copier.stats()
    told = f"{notes(device)}; unpinned bytes {stats.get('device_unpinned_bytes_total', 0)}; checksums on the "
    told += "device" if made.copier.hashes else "host"
    for direction, plain in (("load", "to device"), ("store", "to host")):
        parameters = {**made.case.parameters, "blocks": made.blocks, "way": way, "device": device.type}
        options.keep(
            Figure(f"gpu_client_{direction}", f"KVClient.{direction} of a paged KV cache, from and to DRAM", parameters, "GB/s"),
            samples[direction],
            limit=Reference("one pinned copy", samples[plain]),
            target=Target("limit", 0.9),
            transport="shared memory",
            notes=told,
        )


# ---- steps beside loads ----


def make_step(device: torch.device) -> tuple[str, Callable[[], None]]:
    """Return the kind of a step and the step itself, which waits for its end: a graph replay, or a plain loop on the CPU."""
    if device.type == "cpu":
        small = torch.ones(64, 64)

        def loop() -> None:
            for _ in range(STEP_PRODUCTS):
                torch.mm(small, small)

        return "loop on the CPU", loop
    weights = torch.randn(STEP_SIDE, STEP_SIDE, dtype=torch.bfloat16, device=device)
    tokens = torch.randn(STEP_TOKENS, STEP_SIDE, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(tokens)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.mm(tokens, weights, out=out)  # the library's memory is allocated before the capture
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(STEP_PRODUCTS):
            torch.mm(tokens, weights, out=out)

    used = (weights, tokens, out)

    def replay() -> None:
        assert used  # by address: the graph does not hold them
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()

    return "CUDA graph", replay


def _steps(options: harness.Options, made: Engine, way: str) -> None:
    """Steps, alone and while another thread loads without pause."""
    count = options.pick(full=1000, quick=300, smoke=20)
    lookup = found(made.client, made.store()[0])
    kind, step = make_step(made.device)
    tails: dict[str, list[float]] = {"beside": [], "alone": []}
    loads: list[int] = []

    def window() -> list[float]:
        step()
        return [1e3 * harness.seconds(step) for _ in range(count)]

    def result(name: str, times_ms: list[float]) -> float:
        p50, p99 = np.percentile(times_ms, [50, 99])
        tails[name].append(float(p99))
        return float(p50)

    def beside() -> float:
        ended, begun = threading.Event(), threading.Event()

        def load() -> int:
            done = 0
            while not ended.is_set():
                begun.set()
                made.load(lookup)
                done += 1
            return done

        with ThreadPoolExecutor(1) as thread:
            under_way = thread.submit(load)
            try:
                assert begun.wait(PIN_S)
                times_ms = window()
            finally:
                ended.set()
            loads.append(under_way.result())
        return result("beside", times_ms)

    medians = harness.interleave({"beside": beside, "alone": lambda: result("alone", window())}, options.repetitions)
    synchronize(made.device)
    made.check()
    parameters = {**made.case.parameters, "blocks": made.blocks, "way": way, "step": kind}
    told = f"{notes(made.device)}; {count} steps per round; loads per round {loads[-options.repetitions :]}"
    for name, samples in (("p50", medians), ("p99", {who: tail[-options.repetitions :] for who, tail in tails.items()})):
        options.keep(
            Figure(f"gpu_step_{name}", f"{name} of a step beside loads", parameters, "ms", lower_is_better=True),
            samples["beside"],
            limit=Reference("the same steps alone", samples["alone"]),
            target=Target("limit", 1.03) if name == "p50" else None,
            notes=told,
        )
