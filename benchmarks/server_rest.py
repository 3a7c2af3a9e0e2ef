"""Measure the commands per second that metadata servers run in Valkey without calls of clients, by number of nodes.

One and four metadata servers share an index in three shards, in which 0, 1,000 or 10,000 nodes are registered. This script
replaces the nodes: it writes the records of their heartbeats at the intervals and in the batches of servers that receive them.
Commands of replication are not counted, nor those that this script runs without servers and nodes. Commands that a script in
Valkey runs are counted.

The limit of the design: 50 commands per second and server, and 4 per node.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from harness import CpuCost, Figure, Options, Reference, Target, options
from kvproto.v1.common_pb2 import NodeInfo
from kvstore.core.types import BootId, NodeId
from kvstore.embedded.valkey import ValkeyServers
from kvstore.index.contract import Beat, PrefixIndex
from kvstore.metadata.membership.records import node_note
from rig.served_index import open_valkey, sweep_new_epoch
from rig.shared_servers import SETTLE_S, SharedServers, commands_run

SHARDS = 3
SERVERS = (1, 4)
PER_SERVER = 50
PER_NODE = 4
TICK_S = 0.3125
"""Interval at which a server writes the heartbeats that arrived: an eighth of the default time to live of a node."""
TICKS_PER_BEAT = 0.5 / TICK_S
"""A node sends a heartbeat every 0.5 s."""
NOTES_AT_ONCE = 1_000
REACHED = 0.9
"""Required share of the ticks."""


class Heartbeats:
    """Nodes without volumes, and the records of their heartbeats."""

    def __init__(self, index: PrefixIndex, count: int) -> None:
        self._index = index
        self._boots = {NodeId(f"node-{number}"): BootId(secrets.token_bytes(16)) for number in range(count)}
        self._counter = 0
        self._due = 0.0
        names = list(self._boots)
        for at in range(0, count, NOTES_AT_ONCE):
            index.put_notes({node_note(name): self._info(name) for name in names[at : at + NOTES_AT_ONCE]})

    def _info(self, name: NodeId) -> bytes:
        info = NodeInfo(
            node_id=name,
            boot_id=self._boots[name],
            roles=["storage"],
            control_address="127.0.0.1:1",
            data_address="127.0.0.1:2",
        )
        return info.SerializeToString(deterministic=True)

    def run(self, seconds: float, servers: int) -> None:
        """Write heartbeats as the servers would. Late ones end the benchmark, because they would look like few commands."""
        end_s = time.monotonic() + seconds
        due_s = time.monotonic()
        nodes, ticks = list(self._boots), 0
        while (now_s := time.monotonic()) < end_s:
            if now_s < due_s or not nodes:
                time.sleep(max(0.0, min(end_s, due_s if nodes else end_s) - now_s))
                continue
            due_s += TICK_S
            ticks += 1
            self._counter += 1
            begin, length = self._due, len(nodes) / TICKS_PER_BEAT
            self._due = (begin + length) % len(nodes)
            arrived = [nodes[(int(begin) + at) % len(nodes)] for at in range(int(length))]
            for number in range(servers):
                beats = {name: Beat(self._boots[name], self._counter, 1) for name in arrived[number::servers]}
                if beats:
                    self._index.put_beats(beats)

        if nodes and ticks < REACHED * (seconds // TICK_S):
            sys.exit(f"the machine is too busy: heartbeats were written {ticks} times in {seconds:g} s")

    def forget(self) -> None:
        """Remove all nodes."""
        names = list(self._boots)
        for at in range(0, len(names), NOTES_AT_ONCE):
            part = names[at : at + NOTES_AT_ONCE]
            self._index.put_notes(dict.fromkeys(map(node_note, part)))
            self._index.put_beats(dict.fromkeys(part))


def measure(stack: ExitStack, opts: Options, scratch: Path) -> None:
    """Keep the figures of all numbers of servers and nodes."""
    seconds = opts.pick(full=10.0, quick=6.0, smoke=0.2)
    cluster = stack.enter_context(ValkeyServers(scratch / "valkey", shards=SHARDS))
    index = open_valkey(cluster.seeds)
    stack.callback(index.close)
    sweep_new_epoch(index)

    def rates(heartbeats: Heartbeats, servers: int) -> Counter[str]:
        before, began_s = commands_run(cluster.primaries), time.monotonic()
        heartbeats.run(seconds, servers)
        elapsed_s = time.monotonic() - began_s
        after = commands_run(cluster.primaries)
        return Counter({name: (after[name] - before[name]) / elapsed_s for name in after})

    nobody = Heartbeats(index, 0)
    own = [rates(nobody, 0) for _ in range(opts.repetitions)]
    for servers in SERVERS:
        with SharedServers(scratch, cluster, servers) as shared:
            components = shared.components()
            for nodes in opts.pick(full=(0, 1_000, 10_000), quick=(0, 1_000), smoke=(0, 10)):
                heartbeats = Heartbeats(index, nodes)
                heartbeats.run(opts.pick(full=SETTLE_S, quick=SETTLE_S, smoke=0.2), servers)
                found: list[Counter[str]] = []
                used, _ = components.rates(
                    lambda: found.extend(rates(heartbeats, servers) for _ in range(opts.repetitions))  # noqa: B023  # called at once
                )
                heartbeats.forget()
                totals = [sum(one.values()) - sum(idle.values()) for one, idle in zip(found, own, strict=True)]
                mine = Counter({name: found[-1][name] - own[-1][name] for name in found[-1]})
                most = ", ".join(f"{name} {rate:.1f}" for name, rate in mine.most_common(8) if rate >= 0.1)
                opts.keep(
                    Figure(
                        "server_rest_commands",
                        "Commands per second in Valkey at rest",
                        {"servers": servers, "nodes": nodes},
                        "commands/s",
                        lower_is_better=True,
                    ),
                    totals,
                    limit=Reference("allowed", [float(PER_SERVER * servers + PER_NODE * nodes)]),
                    target=Target("limit", 1.0),
                    cpu=CpuCost("second", {name: rate for name, rate in used.items() if name != "client"}),
                    notes=f"{servers} servers, {nodes} nodes: {most}",
                )


def main() -> None:
    """Measure all figures."""
    opts = options("server_rest", __doc__, repetitions=3)
    with ExitStack() as stack:
        measure(stack, opts, opts.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-rest-"))))


if __name__ == "__main__":
    main()
