"""The LMDB index alone, in one process: what a lookup and a publish cost, what a block takes on disk, how fast it is back.

Chains of 1,600 random keys are published in runs of 64, 16 runs a batch, as nodes stream them. A lookup asks for 1,600 keys of
which a random part is held, over chains drawn at random. All sizes are filled first; then each round asks each of them.
``--blocks 10000 1000000`` picks the sizes.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
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
    """An open index of one size, and some of its chains."""

    place: Path
    index: LmdbIndex
    volume_epoch: VolumeEpoch
    chains: list[bytes]
    publish_s: float


def runs_of(packed: bytes) -> Iterator[BlockRun]:
    """One chain, cut as nodes publish it."""
    keys = tuple(BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES))
    for start in range(0, len(keys), RUN_KEYS):
        yield BlockRun(NAMESPACE, keys[start - 1] if start else None, start, keys[start : start + RUN_KEYS])


def fill(place: Path, blocks: int, seed: int) -> Filled:
    """Makes an index of about as many blocks (whole chains)."""
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
    """Sorted times of single lookups, each answer checked."""
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
    """From opening a closed index to its first answer."""
    filled.index.close()
    begun = time.perf_counter()
    filled.index = LmdbIndex.open(filled.place)
    hit = filled.index.lookup(NAMESPACE, filled.chains[0], {filled.volume_epoch})
    took = time.perf_counter() - begun
    if hit.blocks != CHAIN_KEYS:
        raise SystemExit("the index lost blocks when it was closed")
    return took


def keep_sizes(options: Options, indexes: dict[int, Filled]) -> None:
    """What filling cost."""
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
            Figure("index_bytes", "Index: file bytes a block", parameters, "B", lower_is_better=True),
            [stats.bytes / stats.blocks],
            target=Target("value", 160) if large else None,
        )


def keep_lookups(options: Options, indexes: dict[int, Filled]) -> None:
    """Lookups, one size after the other in each round, held against the smallest."""
    count = options.pick(full=2_000, quick=500, smoke=50)
    chooser = random.Random(options.seed + 1)  # else it would draw the keys that were published again
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
    """Command line: that of all benchmarks, and the sizes."""
    sizes = argparse.ArgumentParser(add_help=False)
    sizes.add_argument("--blocks", type=int, nargs="+")
    arguments = list(sys.argv)
    chosen, sys.argv[1:] = sizes.parse_known_args()
    options = harness.options("micro_index", __doc__)
    sys.argv[:] = arguments  # a record names the whole command
    sizes_by_mode = options.pick(full=[10_000, 1_000_000, 10_000_000], quick=[10_000, 1_000_000], smoke=[3_200])
    with tempfile.TemporaryDirectory(prefix="micro-index-", dir=options.scratch) as folder:
        indexes = {blocks: fill(Path(folder) / str(blocks), blocks, options.seed) for blocks in chosen.blocks or sizes_by_mode}
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
