"""Measure the CPU time of one round of anti-entropy for 1 and for 20 volumes, with the index in LMDB and in three Valkey shards.

A round compares the digests of all volumes with the index, over gRPC, at a real metadata server, as nodes do: volumes whose nodes
compare within a minute share one pass over the index. Half of the blocks are held by two volumes. The digests are the true ones,
so every comparison must find nothing to repair. The limit of an index in Valkey is the CPU time of the same commands in a bare
loop, of one process and the shards.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from harness import CpuMeter, Figure, Options, Reference, Target, interleave, options
from kvproto.v1.metadata_pb2 import CompareDigestsRequest
from kvproto.v1.metadata_pb2_grpc import MetadataStub
from kvstore.core.checksum import digest_keys, key_range
from kvstore.core.limits import DIGEST_RANGES
from kvstore.core.types import KEY_BYTES, BlockKey, BlockRun, Tier, VolumeId
from kvstore.embedded.valkey import ValkeyServers
from kvstore.index.contract import PrefixIndex
from kvstore.rpc.client import call
from peers.bare_valkey import BareValkey
from rig.served_index import BOOT_ID, CHAIN, NAMESPACE, NODE_ID, Client, Served, register_volumes
from rig.shared_servers import Components

SHARDS = 3
VOLUMES, FEW_VOLUMES = (1, 20), (1, 2)
ROUND_S = 300.0
SHARED_MS = 60_000
"""Age of a pass that other volumes may use."""


class Audited:
    """An index of some volumes, its server, and the requests of one round."""

    def __init__(
        self, stack: ExitStack, folder: Path, volumes: int, blocks: int, seed: int, cluster: ValkeyServers | None
    ) -> None:
        self._volumes = [VolumeId(f"{NODE_ID}/nvme{number}") for number in range(volumes)]
        self._held: dict[VolumeId, list[BlockKey]] = defaultdict(list)
        self.served = stack.enter_context(Served(folder, blocks, seed, cluster.seeds if cluster else (), self._fill))
        shards = {f"shard {at}": one.process.pid for at, one in enumerate(cluster.primaries)} if cluster else {}
        self.meter = CpuMeter(metadata=self.served.pid, **shards)
        self.components = Components({"metadata": [self.served.pid], "shards": list(shards.values())})
        self._millions = blocks // CHAIN * CHAIN / 1e6
        client = Client.of(self.served.address, self.served.chains)
        stack.callback(client.channel.close)
        self._stub = MetadataStub(client.channel)
        self._bare = stack.enter_context(BareValkey([one.address for one in cluster.primaries])) if cluster else None
        self._requests = [self._request(volume) for volume in self._volumes]

    def _fill(self, index: PrefixIndex, blocks: int, seed: int) -> list[bytes]:
        opened = register_volumes(index, dict.fromkeys(self._volumes, Tier.NVME))
        draw, count = random.Random(seed), len(opened)
        for number in range(blocks // CHAIN):
            packed = draw.randbytes(KEY_BYTES * CHAIN)
            keys = tuple(BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES))
            for holder in {number % count, (number * 7 + 1) % count} if number % 2 else {number % count}:
                index.publish(opened[holder], [BlockRun(NAMESPACE, None, 0, keys)], [])
                self._held[self._volumes[holder]] += keys
        return [packed]

    def _request(self, volume: VolumeId) -> CompareDigestsRequest:
        keys_of: list[list[BlockKey]] = [[] for _ in range(DIGEST_RANGES)]
        for key in self._held[volume]:
            keys_of[key_range(key)].append(key)
        return CompareDigestsRequest(
            node_id=NODE_ID,
            boot_id=BOOT_ID,
            volume_id=volume,
            digests=[digest_keys(keys) for keys in keys_of],
            counts=[len(keys) for keys in keys_of],
        )

    def round_s(self) -> float:
        """CPU seconds per million records of one round, of the server and the shards."""
        before = self.components.seconds()
        self.meter.time(self._millions, self._compare)
        used = self.components.seconds()
        return sum(used[name] - before[name] for name in used if name != "client") / self._millions

    def bare_s(self) -> float:
        """CPU seconds per million records of the same commands without a metadata server, of this process and the shards."""
        assert self._bare is not None
        before = self.components.seconds()
        read = self._bare.run()
        used = self.components.seconds()
        assert read >= self._millions * 1e6
        return (sum(used.values()) - sum(before.values()) - used["metadata"] + before["metadata"]) / self._millions

    def _compare(self) -> None:
        for number, request in enumerate(self._requests):
            request.max_age_ms = SHARED_MS if number else 0  # the first one reads the index
            if differing := call(self._stub.CompareDigests, request, ROUND_S).differing_ranges:
                sys.exit(f"{len(differing)} ranges differ")


def measure(stack: ExitStack, opts: Options, scratch: Path) -> None:
    """Keep the figures."""
    blocks = opts.pick(full=400_000, quick=200_000, smoke=4 * CHAIN)
    counts = opts.pick(full=VOLUMES, quick=VOLUMES, smoke=FEW_VOLUMES)
    beds: dict[tuple[str, int], Audited] = {}
    for volumes in counts:
        cluster = stack.enter_context(ValkeyServers(scratch / f"valkey-{volumes}", shards=SHARDS))
        for name, over in (("lmdb", None), ("valkey", cluster)):
            beds[name, volumes] = Audited(stack, scratch / f"{name}-{volumes}", volumes, blocks, opts.seed, over)
    contestants = {f"{name} {volumes}": bed.round_s for (name, volumes), bed in beds.items()}
    contestants |= {f"bare {volumes}": beds["valkey", volumes].bare_s for volumes in counts}
    samples = interleave(contestants, opts.repetitions)
    for (name, volumes), bed in beds.items():
        opts.keep(
            Figure(
                "audit_round",
                "Round of anti-entropy: CPU time of server and shards per million records",
                {"index": name, "blocks": blocks // CHAIN * CHAIN, "volumes": volumes},
                "s",
                lower_is_better=True,
            ),
            samples[f"{name} {volumes}"],
            peer=Reference("1 volume", samples[f"{name} 1"]) if volumes > 1 else None,
            limit=Reference("the same commands in a bare loop", samples[f"bare {volumes}"]) if name == "valkey" else None,
            target=Target("value", 1.0),
            transport="gRPC, loopback TCP",
            cpu=bed.meter.cost("operation"),
        )


def main() -> None:
    """Measure all figures."""
    opts = options("audit_cost", __doc__)
    with ExitStack() as stack:
        measure(stack, opts, opts.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-audit-"))))


if __name__ == "__main__":
    main()
