"""Check of a client's counters: requested blocks are either hits or misses, after any failure."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.observe.metric_definitions import METRICS


def check_accounts(totals: Mapping[str, int], block_tokens: int) -> None:
    """Check one client's totals, as ``KVClient.stats`` returns them between two calls.

    Raises:
        AssertionError: they do not add up.
    """

    def total(metric: str) -> int:
        return sum(totals.get(event, 0) for event in METRICS[metric].events)

    for unit in ("blocks", "tokens"):
        asked = total(f"kvstore_client_asked_{unit}_total")
        hit, missed = total(f"kvstore_client_hit_{unit}_total"), total(f"kvstore_client_missed_{unit}_total")
        assert asked == hit + missed, f"{unit}: asked for {asked}, hit {hit}, missed {missed}"
    assert total("kvstore_client_asked_tokens_total") == total("kvstore_client_asked_blocks_total") * block_tokens
    assert total("kvstore_client_hit_blocks_total") == total("kvstore_client_load_hit_blocks_total")
    assert total("kvstore_client_asked_blocks_total") >= total("kvstore_client_load_blocks_total")
