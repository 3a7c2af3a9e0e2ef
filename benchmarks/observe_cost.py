"""What it costs to be seen: loads from this host's DRAM with metrics scraped and logs at info, against the same without.

Two stores run side by side, and clients in turn, each over the same blocks. *On*: ``/metrics`` of node and client, scraped every
second, logs at info. *Off*: nothing served, logs at error; totals are counted all the same, as always. *Without spans*: as off,
and the client's places where a span and a request's name would be are cut out. *Without accounts*: the same of what it counts
and keeps of each load.
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
from rig import OPTIONS, Chains, cluster, found, loaded, room_for, spec, stored

LAYERS = 32
SCRAPE_S = 1.0


@contextmanager
def scraping(*addresses: str) -> Iterator[None]:
    """Asks for metrics all the time, as Prometheus would."""
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
    """Cuts out of the client what is there to be seen by: its spans, or its accounts."""

    def nothing(*_: object, **__: object) -> AbstractContextManager[None]:
        return nullcontext()  # a mock's own call would cost more than what it stands for

    with ExitStack() as stack:
        if what == "spans":
            stack.enter_context(mock.patch("kvclient.load.load.named_request", nothing))
            stack.enter_context(mock.patch("kvclient.load.load.tracing.span", nothing))
        else:
            stack.enter_context(mock.patch.object(HitAccounting, "account", nothing))
            stack.enter_context(mock.patch.object(LoadTrace, "phase", nothing))
        yield


def measure(options: Options, block_bytes: int, blocks: int, loads: int) -> None:
    """One size of a load."""
    cache = spec(block_bytes, LAYERS)
    chains = Chains(cache, blocks, options.seed)
    chain = chains.next()
    room = room_for(blocks, block_bytes)
    buffer = np.zeros((blocks, block_bytes), np.uint8)
    with ExitStack() as stack:
        stores: dict[str, LocalCluster] = {}  # all before the first client: gRPC's threads and forks do not go together
        for name, level, metrics in (("on", "info", "127.0.0.1:0"), ("off", "error", "none")):
            with mock.patch.dict(os.environ, {"KVSTORE_LOG__LEVEL": level}):
                node = NodeSpec("bench", dram_bytes=room, settings=(("metrics_listen", metrics),))
                stores[name] = stack.enter_context(cluster(node, options.scratch))
        clients: dict[str, KVClient] = {}
        for name, store in stores.items():
            chosen = replace(OPTIONS, metrics_listen="127.0.0.1:0" if name == "on" else None)
            client = KVClient.connect(store.metadata_address, cache, node=store.node("bench").local_socket, options=chosen)
            clients[name] = stack.enter_context(client)
            stored(client.store(chain.keys, chain.payload))
            if name == "on":
                assert client._metrics is not None
                stack.enter_context(scraping(client._metrics.address, store.node("bench").metrics_address))
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
    """Command line."""
    options = harness.options("observe_cost", __doc__)
    sizes = options.pick(full=((64 << 10, 64, 400), (1 << 20, 128, 12)), quick=((64 << 10, 64, 10),), smoke=((64 << 10, 4, 2),))
    for block_bytes, blocks, loads in sizes:
        measure(options, block_bytes, blocks, loads)


if __name__ == "__main__":
    main()
