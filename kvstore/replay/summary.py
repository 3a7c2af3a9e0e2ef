"""Summary of a replay for people, and its verdict."""

from __future__ import annotations

from kvstore.replay.report import show_bytes, tally_rows
from kvstore.replay.run import ReplayResult


def replay_rows(result: ReplayResult) -> dict[str, str]:
    """Rows of the summary table."""
    workload = result.workload
    unbounded = workload.unbounded
    rows = {
        "trace": f"{workload.info.name} ({workload.info.format}), {workload.unique_blocks:,} distinct blocks",
        "blocks": f"{show_bytes(workload.spec.block_bytes)} in {workload.spec.layers} layers",
        "store": f"{result.capacity}, eviction {result.policy}",
        **tally_rows(result.tally, result.seconds),
        "hits, unlimited store": f"{unbounded.hit_blocks:,} ({unbounded.ratio:.2%})",
    }
    if result.best is not None:
        rows["hits, best possible"] = f"{result.best.hit_blocks:,} ({result.best.ratio:.2%}) at this capacity"
    return rows


def verdict(result: ReplayResult) -> str | None:
    """Error of a replay, if any."""
    tally = result.tally
    unbounded = result.workload.unbounded.hit_blocks
    if tally.wrong_bytes:
        return f"{tally.wrong_bytes:,} wrong bytes in {tally.wrong_blocks:,} blocks"
    if tally.blocks_hit > unbounded:
        return f"{tally.blocks_hit:,} hits where only {unbounded:,} are possible"
    if not result.capacity.limited and not result.exact:
        return f"{unbounded - tally.blocks_hit:,} hits are missing although there was space for every block"
    return None
