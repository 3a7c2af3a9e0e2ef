"""Measure the cost of observability: loads from this host's DRAM with and without metrics and info logs.

Two stores run at the same time, and their clients load the same blocks alternately. *On*: ``/metrics`` of node and client are
scraped every second, logs at info. *Off*: no metrics server, logs at error; totals are still counted. *Without spans*: like off,
with the client's code for spans and request ids patched out. *Without accounts*: like off, with the client's accounting per load
patched out.
"""

from __future__ import annotations

import os
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import numpy as np

import harness
from harness import Figure, Options, Reference, Target
from kvclient import KVClient
from kvclient.load.accounting import HitAccounting, LoadTrace
from kvstore.core.types import Tier
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from rig import OPTIONS, Chains, cluster, found, loaded, space_for, spec, stored

LAYERS = 32
SCRAPE_S = 1.0


@contextmanager
def scraping(*addresses: str) -> Iterator[None]:
    """Periodic scrapes of metrics, like those of Prometheus."""
    stop = threading.Event()

    def scrape() -> None:
        while not stop.wait(SCRAPE_S):
            for address in addresses:
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                    answer.read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def without(what: str) -> Iterator[None]:
    """Patch the spans or the accounting out of the client."""

    def nothing(*_: object, **__: object) -> AbstractContextManager[None]:
        return nullcontext()  # calling a mock would cost more than the code it replaces

    with ExitStack() as stack:
        if what == "spans":
            stack.enter_context(mock.patch("kvclient.load.load.tracing.named_request", nothing))
            stack.enter_context(mock.patch("kvclient.load.load.tracing.span", nothing))
        else:
            stack.enter_context(mock.patch.object(HitAccounting, "account", nothing))
            stack.enter_context(mock.patch.object(LoadTrace, "phase", nothing))
        yield


def measure(options: Options, block_bytes: int, blocks: int, loads: int) -> None:
    """Measure one load size."""
    cache = spec(block_bytes, LAYERS)
    chains = Chains(cache, blocks, options.seed)
    chain = chains.next()
    space = space_for(blocks, block_bytes)
    buffer = np.zeros((blocks, block_bytes), np.uint8)
    with ExitStack() as stack:
        stores: dict[str, LocalCluster] = {}  # start all processes before the first client: gRPC's threads do not survive a fork
        for name, level, metrics in (("on", "info", "127.0.0.1:0"), ("off", "error", "none")):
            with mock.patch.dict(os.environ, {"KVSTORE_LOG__LEVEL": level}):
                node = NodeSpec("bench", dram_bytes=space, settings=(("metrics_listen", metrics),))
                stores[name] = stack.enter_context(cluster(node, options.scratch))
        clients: dict[str, KVClient] = {}
        for name, store in stores.items():
            chosen = replace(OPTIONS, metrics_listen="127.0.0.1:0" if name == "on" else None)
            client = KVClient.connect(store.metadata_address, cache, node=store.node("bench").local_socket, options=chosen)
            clients[name] = stack.enter_context(client)
            stored(client.store(chain.keys, chain.payload))
            if name == "on":
                assert client.metrics_address is not None
                stack.enter_context(scraping(client.metrics_address, store.node("bench").metrics_address))
        lookups = {name: found(client, chain.keys) for name, client in clients.items()}

        def load(name: str) -> float:
            def work() -> None:
                for _ in range(loads):
                    loaded(clients[name].load(lookups[name], buffer), Tier.DRAM)

            return harness.gigabytes_per_second(loads * blocks * block_bytes, work)

        def bare(what: str) -> float:
            with without(what):
                return load("off")

        contestants = {
            "on": lambda: load("on"),
            "off": lambda: load("off"),
            "spans": lambda: bare("spans"),
            "accounts": lambda: bare("accounts"),
        }
        samples = harness.interleave(contestants, options.repetitions)
        chains.check(chain, buffer)
    parameters = {"block_bytes": block_bytes, "blocks": blocks, "loads": loads}
    options.keep(
        Figure("observe_on", "Load throughput with metrics scraped and logs at info", parameters, "GB/s"),
        samples["on"],
        peer=Reference("nothing served, logs at error", samples["off"]),
        target=Target("peer", 0.97),
        transport="shared memory",
    )
    options.keep(
        Figure("observe_traces_off", "Load throughput with traces off", parameters, "GB/s"),
        samples["off"],
        peer=Reference("the client without spans", samples["spans"]),
        target=Target("peer", 0.97),
        transport="shared memory",
    )
    options.keep(
        Figure("observe_accounts", "Load throughput with loads accounted for", parameters, "GB/s"),
        samples["off"],
        peer=Reference("the client without accounts", samples["accounts"]),
        transport="shared memory",
    )


def main() -> None:
    """Measure all load sizes."""
    options = harness.options("observe_cost", __doc__)
    sizes = options.pick(full=((64 << 10, 64, 400), (1 << 20, 128, 12)), quick=((64 << 10, 64, 10),), smoke=((64 << 10, 4, 2),))
    for block_bytes, blocks, loads in sizes:
        measure(options, block_bytes, blocks, loads)


if __name__ == "__main__":
    main()
