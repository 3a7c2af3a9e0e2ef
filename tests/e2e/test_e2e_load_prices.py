"""The planner's price of a load reaches the scheduler's half of an engine, and another load in the queue makes it compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from conftest import Store
from kvclient import KVClient, Tier
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.identity.keys import RequestKeys
from kvclient.engines.vllm.scheduler.load_prices import PriceQuery, QuotedPrice
from kvclient.engines.vllm.scheduler.prefix_lookup import BackgroundLookup, PrefixMatch
from kvstore.embedded.cluster import NodeSpec
from kvstore.recompute.decisions import LoadDecisions, Segment
from kvstore.recompute.verdict import Choice
from support.wait import wait_until

MIB = 1 << 20
BLOCKS = 48
TIMEOUT_S = 30.0
HOSTS = (
    NodeSpec("s", roles=("storage",), dram_bytes=32 * MIB, nvme_bytes=128 * MIB),
    NodeSpec("p", dram_bytes=32 * MIB, write_back_to="s"),
)


@pytest.fixture
def beyond(make_store: Callable[..., Store]) -> Iterator[tuple[KVClient, Callable[[], PrefixMatch]]]:
    """A client of the prefill host, and a lookup of a chain that only the storage of another host has."""
    store = make_store(*HOSTS)
    engine = store.engine("p", layer_bytes=64 << 10)
    lookup = BackgroundLookup(HookOptions(metadata=store.cluster.metadata_address), [[engine.spec]], ConnectorCounters())
    tokens = list(range(BLOCKS * engine.spec.block_tokens))
    keys = RequestKeys(lookup.chain, {})
    payload = engine.allocate(BLOCKS)
    assert engine.client.store(keys.upto(tokens, BLOCKS), payload, durable=True).durable
    for node in "ps":
        store.empty_dram(node)

    def found() -> PrefixMatch:
        return lookup.begin(keys, tokens, BLOCKS, PriceQuery("p", None)).result(TIMEOUT_S)

    def is_stored_beyond() -> bool:
        runs = next(iter(match.by_group[0].values())).runs if (match := found()).hit_blocks == BLOCKS else ()
        return {(run.node_id, run.tier) for run in runs} == {("s", Tier.NVME)}

    wait_until(is_stored_beyond)
    yield engine.client, found
    lookup.close()


def test_price_of_busy_link_makes_engine_compute(beyond: tuple[KVClient, Callable[[], PrefixMatch]]) -> None:
    client, found = beyond
    decisions = LoadDecisions(client.spec.block_tokens, client.spec.shape.block_bytes, step_tokens=8192)
    for _ in range(3):
        decisions.step_ended([(0, 1000)], 0.2)

    def choice() -> Choice:
        quoted = quote(found)
        segments = [Segment("links", BLOCKS)]
        verdict = decisions.decide(segments, 0, (BLOCKS + 1) * client.spec.block_tokens, {"links": quoted.price})
        assert verdict is not None
        return verdict.choice

    assert choice() is Choice.LOAD
    metadata = client.context.metadata
    assert metadata is not None
    other = metadata.plan_load(
        "p", None, None, 50_000, client.spec.block_bytes, client.spec.block_tokens, TIMEOUT_S, relays=False
    )
    assert choice() in {Choice.COMPUTE, Choice.PROBE}
    metadata.report_loads({other.plan_id: []}, finished=True)
    wait_until(lambda: choice() is Choice.LOAD)


def quote(found: Callable[[], PrefixMatch]) -> QuotedPrice:
    """The price with a lookup; on a busy machine the planner may be asked several times."""
    quoted: QuotedPrice | None = None

    def is_quoted() -> bool:
        nonlocal quoted
        quoted = found().price
        return quoted is not None

    wait_until(is_quoted)
    assert quoted is not None
    return quoted
