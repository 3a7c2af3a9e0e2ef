"""Measure hits in an engine's own pool, copied to the engine's memory, against one plain copy of the same bytes on that device.

``--device cpu`` (the default): the pool is host memory and the peer one ``memcpy``. ``--device cuda:N``: blocks are copied from
the pool to a tensor on the same GPU, and the peer is one device-to-device copy. Chains were stored in random order, so that the
slots of a chain are not all consecutive.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch

import harness
from harness import Figure, Options, Reference, Target
from kvclient import CacheSpec
from kvclient.call.execution import CallScope
from kvclient.hbm import HbmPool
from kvclient.hbm.tensors import until_done
from kvstore.core.buffers import DenseBlocks
from kvstore.core.clock import MonotonicClock
from kvstore.core.keys import KeyChain

LAYERS = 32
CHAINS = 8


def measure(options: Options, device: str, layer_block_bytes: int, blocks: int) -> None:
    """Measure one block size. Chains of equal length are stored interleaved, a few blocks at a time, and read chain by chain."""
    spec = CacheSpec(model="bench", block_tokens=16, layers=LAYERS, layer_block_bytes=layer_block_bytes)
    per_chain = blocks // CHAINS
    total = per_chain * spec.block_bytes
    with HbmPool(device, capacity_bytes=2 * blocks * spec.block_bytes, demote=False) as pool:
        near = pool.blocks(spec)
        random = np.random.default_rng(options.seed)
        tokens = [random.integers(0, 1 << 20, per_chain * spec.block_tokens, dtype=np.uint32) for _ in range(CHAINS)]
        chains = [KeyChain(spec).keys(one) for one in tokens]
        rows = np.ones((per_chain, LAYERS, layer_block_bytes), np.uint8)
        for first in range(0, per_chain, 4):
            for keys in chains:
                part = keys[first : first + 4]
                kept = near.insert(
                    part, keys[first - 1] if first else None, first, DenseBlocks(rows[: len(part)]), None, checksums=False
                )
                assert kept == len(part)
        where = pool.usage()
        assert where.blocks == per_chain * CHAINS
        target = near.volume.device
        out = torch.zeros(rows.shape, dtype=torch.uint8, device=target)
        plain = torch.ones_like(out)
        turn = iter(range(1 << 30))
        clock = MonotonicClock()

        def copied() -> None:
            assert near.copy_to_tensor(chains[next(turn) % CHAINS], out) == per_chain

        def fetched() -> None:
            buffer = DenseBlocks(out.numpy())
            assert near.fetch(chains[next(turn) % CHAINS], buffer, CallScope.after(60.0, clock), verify=False) == per_chain

        def one_copy() -> None:
            out.copy_(plain)
            until_done(target)

        contestants = {"hit to a tensor of the device": copied, "one copy": one_copy}
        if target.type == "cpu":
            contestants["hit to a host buffer"] = fetched
        rate = partial(harness.gigabytes_per_second, total)
        samples = harness.interleave({name: partial(rate, work) for name, work in contestants.items()}, options.repetitions)
        name = torch.cuda.get_device_name(target) if target.type == "cuda" else "host memory"
        for what in contestants:
            if what == "one copy":
                continue
            parameters: dict[str, str | int | float | bool] = {"device": target.type, "block_bytes": spec.block_bytes}
            options.keep(
                Figure("hbm_hit", "Hit in the engine's own pool", {**parameters, "blocks": per_chain, "what": what}, "GB/s"),
                samples[what],
                peer=Reference("one copy on the device", samples["one copy"]),
                target=Target("peer", 0.8) if target.type == "cuda" else None,
                transport="none",
                verified=False,
                notes=f"device: {name}",
            )


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N (default cpu)")


def main() -> None:
    """Measure all block sizes."""
    options = harness.options("hbm_pool", __doc__, arguments=_arguments)
    device = options.extra.device
    for layer_block_bytes in options.pick(full=(8 << 10, 64 << 10), quick=(64 << 10,), smoke=(4 << 10,)):
        space = options.pick(full=1 << 30, quick=512 << 20, smoke=8 << 20)
        measure(options, device, layer_block_bytes, max(CHAINS * 4, space // (LAYERS * layer_block_bytes)))


if __name__ == "__main__":
    main()
