"""Measure the LMDB index alone, in one process: cost of lookups and publishes, file bytes per block, time to reopen.

Chains of 1,600 random keys are published in runs of 64 keys, 16 runs per batch, like the streams of nodes. A lookup requests
1,600 keys of a random chain, of which the index holds a random leading part. All sizes are filled first, then each round measures
every size. ``--blocks 10000 1000000`` selects the sizes.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import harness
from harness import Figure, Options, Reference, Target
from kvstore.core.types import KEY_BYTES, BlockKey, BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.index.contract import VolumeEpoch
from kvstore.index.lmdb import LmdbIndex

CHAIN_KEYS = 1_600
RUN_KEYS = 64
BATCH_RUNS = 16
KEPT_CHAINS = 2_000
NAMESPACE = NamespaceId(b"n" * KEY_BYTES)


@dataclass(slots=True)
class Filled:
    """An open index of one size, and a sample of its chains."""

    place: Path
    index: LmdbIndex
    volume_epoch: VolumeEpoch
    chains: list[bytes]
    publish_s: float


def runs_of(packed: bytes) -> Iterator[BlockRun]:
    """Split one chain into runs, as nodes publish it."""
    keys = tuple(BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES))
    for start in range(0, len(keys), RUN_KEYS):
        yield BlockRun(NAMESPACE, keys[start - 1] if start else None, start, keys[start : start + RUN_KEYS])


def fill(place: Path, blocks: int, seed: int) -> Filled:
    """Create an index of about ``blocks`` blocks, in whole chains."""
    index = LmdbIndex.open(place)
    volume_epoch = index.open_volume_epoch(VolumeId("v"), NodeId("n"), Tier.DRAM, BootId(os.urandom(KEY_BYTES)))
    chooser = random.Random(seed)
    filled = Filled(place, index, volume_epoch, [], 0.0)
    batch: list[BlockRun] = []
    chains = max(1, blocks // CHAIN_KEYS)
    for number in range(chains):
        packed = chooser.randbytes(CHAIN_KEYS * KEY_BYTES)
        if len(filled.chains) < KEPT_CHAINS:
            filled.chains.append(packed)
        elif (at := chooser.randrange(number + 1)) < KEPT_CHAINS:
            filled.chains[at] = packed
        batch += runs_of(packed)
        while len(batch) >= BATCH_RUNS or (batch and number == chains - 1):
            part, batch = batch[:BATCH_RUNS], batch[BATCH_RUNS:]
            begun = time.perf_counter()
            index.publish(volume_epoch, part, ())
            filled.publish_s += time.perf_counter() - begun
    return filled


def lookup_seconds(filled: Filled, count: int, chooser: random.Random) -> list[float]:
    """Measure single lookups and check each answer. Returns the sorted times."""
    visible = {filled.volume_epoch}
    took: list[float] = []
    for _ in range(count):
        held = chooser.randrange(CHAIN_KEYS + 1)
        asked = chooser.choice(filled.chains)[: held * KEY_BYTES] + chooser.randbytes((CHAIN_KEYS - held) * KEY_BYTES)
        begun = time.perf_counter()
        hit = filled.index.lookup(NAMESPACE, asked, visible)
        took.append(time.perf_counter() - begun)
        if hit.blocks != held:
            raise SystemExit(f"a lookup answered {hit.blocks} blocks where {held} are held")
    return sorted(took)


def reopen_seconds(filled: Filled) -> float:
    """Measure the time from opening a closed index to its first answer."""
    filled.index.close()
    begun = time.perf_counter()
    filled.index = LmdbIndex.open(filled.place)
    hit = filled.index.lookup(NAMESPACE, filled.chains[0], {filled.volume_epoch})
    took = time.perf_counter() - begun
    if hit.blocks != CHAIN_KEYS:
        raise SystemExit("the index lost blocks when it was closed and reopened")
    return took


def keep_sizes(options: Options, indexes: dict[int, Filled]) -> None:
    """Record the cost of filling the index."""
    for blocks, filled in indexes.items():
        stats = filled.index.stats()
        parameters = {"blocks": blocks, "batch": RUN_KEYS * BATCH_RUNS}
        large = blocks >= 1_000_000
        options.keep(
            Figure("index_publish", "Index: publishing runs of 64 keys", parameters, "keys/s"),
            [stats.blocks / filled.publish_s],
            target=Target("value", 200_000) if blocks == 1_000_000 else None,
        )
        options.keep(
            Figure("index_bytes", "Index: file bytes per block", parameters, "B", lower_is_better=True),
            [stats.bytes / stats.blocks],
            target=Target("value", 160) if large else None,
        )


def keep_lookups(options: Options, indexes: dict[int, Filled]) -> None:
    """Measure lookups of each size in each round, compared with the smallest index."""
    count = options.pick(full=2_000, quick=500, smoke=50)
    chooser = random.Random(options.seed + 1)  # the same seed would generate the published keys again
    p50: dict[int, list[float]] = {blocks: [] for blocks in indexes}
    p99: dict[int, list[float]] = {blocks: [] for blocks in indexes}
    for round_number in range(-1, options.repetitions):
        for blocks, filled in indexes.items():
            took = lookup_seconds(filled, count, chooser)
            if round_number >= 0:
                p50[blocks].append(took[len(took) // 2] * 1e6)
                p99[blocks].append(took[int(len(took) * 0.99)] * 1e6)
    smallest = min(indexes)
    for blocks in indexes:
        options.keep(
            Figure("index_lookup_p50", "Index: lookup of 1,600 keys, p50", {"blocks": blocks}, "us", lower_is_better=True),
            p50[blocks],
            peer=Reference(f"{smallest} blocks", p50[smallest]) if blocks != smallest else None,
            target=Target("value", 40) if blocks == 1_000_000 else None,
        )
        options.keep(Figure("index_lookup_p99", "Index: lookup of 1,600 keys, p99", {"blocks": blocks}, "us", True), p99[blocks])


def main() -> None:
    """Measure all sizes."""

    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--blocks", type=int, nargs="+", help="blocks of each index (default: those of the mode)")

    options = harness.options("micro_index", __doc__, arguments=own)
    by_mode = options.pick(full=[10_000, 1_000_000, 10_000_000], quick=[10_000, 1_000_000], smoke=[3_200])
    with tempfile.TemporaryDirectory(prefix="micro-index-", dir=options.scratch) as folder:
        chosen = options.extra.blocks or by_mode
        indexes = {blocks: fill(Path(folder) / str(blocks), blocks, options.seed) for blocks in chosen}
        keep_sizes(options, indexes)
        keep_lookups(options, indexes)
        for blocks, filled in indexes.items():
            options.keep(
                Figure("index_reopen", "Index: opening to first answer", {"blocks": blocks}, "s", lower_is_better=True),
                [reopen_seconds(filled) for _ in range(options.repetitions)],
                target=Target("value", 2.0),
            )
            filled.index.close()


if __name__ == "__main__":
    main()
