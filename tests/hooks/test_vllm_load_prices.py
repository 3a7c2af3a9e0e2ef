"""Prices of loads over storage links: when the planner is asked, and what happens if it does not answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvclient import Lookup, NodeRef, Paths, Run, Tier, Unavailable
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.scheduler.load_prices import LoadPrices, PriceQuery, QuotedPrice
from kvstore.core.types import BlockKey, NodeId, VolumeId


class Answers:
    """A metadata client that answers prices, or fails."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.calls = 0

    def price_load(self, *_: object) -> Any:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return "price"


def asked(prices: LoadPrices, answers: Answers | None, tier: Tier = Tier.NVME) -> QuotedPrice | None:
    """The price of four blocks of another host."""
    run = Run(0, 4, NodeRef(NodeId("s"), "c", "d"), tier, VolumeId("v"))
    context = SimpleNamespace(metadata=answers, options=SimpleNamespace(paths=Paths()))
    client: Any = SimpleNamespace(context=context, spec=SimpleNamespace(block_tokens=4))
    return prices.ask(client, Lookup([BlockKey(bytes(16))] * 4, 4, (run,)), PriceQuery("p", None))


def test_price_not_answered_pauses_the_questions() -> None:
    counters, answers = ConnectorCounters(), Answers(Unavailable("away"))
    prices = LoadPrices(1000, counters)
    assert [asked(prices, answers) for _ in range(3)] == [None] * 3
    assert answers.calls == 1
    assert counters.totals() == {"prices_missed": 3}


def test_price_is_asked_only_for_storage_of_others() -> None:
    counters, answers = ConnectorCounters(), Answers(None)
    prices = LoadPrices(1000, counters)
    assert asked(prices, answers, Tier.DRAM) is None
    assert asked(prices, None) is None
    assert answers.calls == 0
    assert asked(prices, answers) is not None
    assert counters.totals() == {}
