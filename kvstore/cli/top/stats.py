"""Figures of ``kvstore top``: rates, shares and latencies between two samples of a store. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore.cli.commands.store.shard_lines import shard_summary
from kvstore.cli.support import output
from kvstore.core.errors import InvalidArgument
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.rpc.address import stays_on_host

if TYPE_CHECKING:
    from kvstore.control_api.schemas.cluster import Cluster
    from kvstore.control_api.schemas.shards import Shards
    from kvstore.control_api.schemas.store import Activity, LoadTimes, Node, UnreachableNode, Volume

REACHES: Final = ("dram", "nvme", "peer", "none")
"""Farthest source of a load; ``none``: no hit."""
PLANE: Final = ("served", "taken", "fetched", "written")
TIERS: Final = ("hbm", "dram", "nvme")
_LOOPBACK: Final = "loopback"


@dataclass(frozen=True, slots=True)
class StoreSample:
    """Sample of a store at one time."""

    at_s: float
    """Monotonic time of the sample in seconds."""
    cluster: Cluster
    shards: Shards
    counters: Mapping[str, int]
    """Counters of the metadata server."""
    nodes: Sequence[Node]
    volumes: Sequence[Volume]
    activities: Mapping[str, Activity]
    unreached: Sequence[UnreachableNode]


@dataclass(slots=True)
class LoadDurations:
    """Loads between two samples, and their durations."""

    loads: int = 0
    total_s: float = 0.0
    buckets: dict[float, int] = field(default_factory=dict)
    """Loads by upper bound of the bucket in seconds; the last bound is infinite."""

    def add(self, other: LoadDurations) -> None:
        """Add the loads of other times."""
        self.loads += other.loads
        self.total_s += other.total_s
        for bound, loads in other.buckets.items():
            self.buckets[bound] = self.buckets.get(bound, 0) + loads

    def quantile(self, part: float) -> float | None:
        """Upper bound of the bucket that contains the load of this rank; infinite: the last bucket; None: no loads."""
        left = part * self.loads
        for bound, loads in sorted(self.buckets.items()):
            left -= loads
            if loads and left <= 0:
                return bound
        return None


@dataclass(slots=True)
class Line:
    """Figures of a node between two samples. Rates are in bytes per second, the queue is in bytes."""

    node_id: str
    state: str
    answered: bool
    loads_per_s: float
    times: LoadDurations
    loaded: dict[str, float]
    plane: dict[str, float]
    links: dict[str, float]
    """``storage in``, ``storage out``, ``compute in``, ``compute out``; without links that the kernel does not report."""
    loopback: tuple[str, ...]
    """Networks of the links that are the loopback interface, which also carries traffic of other programs."""
    fill: dict[str, tuple[int, int]]
    """Used and total bytes by tier."""
    queue: int

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second loaded to engines from all sources."""
        return sum(self.loaded.values())


@dataclass(frozen=True, slots=True)
class StoreRates:
    """Figures of a store between two samples."""

    seconds: float
    cluster: Cluster
    shards: Shards
    lookups_per_s: float
    hit_ratio: float | None
    times: Mapping[str, LoadDurations]
    lines: Sequence[Line]
    unreached: Sequence[UnreachableNode]

    @property
    def all_times(self) -> LoadDurations:
        """Sum the loads of all reaches."""
        return _sum(self.times.values())


ORDERS: Final[Mapping[str, tuple[str, Callable[[Line], tuple[float, str]]]]] = {
    "n": ("name", lambda line: (0.0, line.node_id)),
    "l": ("loads", lambda line: (-line.loads_per_s, line.node_id)),
    "b": ("bytes", lambda line: (-line.bytes_per_s, line.node_id)),
    "t": ("time", lambda line: (-(line.times.quantile(0.99) or 0.0), line.node_id)),
    "d": ("dram", lambda line: (-_fill(line.fill.get("dram")), line.node_id)),
    "u": ("queue", lambda line: (-float(line.queue), line.node_id)),
}
"""Sort orders by key: name and sort value of a node."""


def figures(before: StoreSample, after: StoreSample) -> StoreRates:
    """Compute the figures between two samples. If a node restarted in between, its counts begin at the restart."""
    seconds = max(after.at_s - before.at_s, 1e-3)
    times: dict[str, LoadDurations] = {reach: LoadDurations() for reach in REACHES}
    lines = []
    for node in after.nodes:
        now = after.activities.get(node.node_id)
        seen = before.activities.get(node.node_id, now)  # no rates for a new node: the period of its counts is unknown
        was = None if now is None or seen is None or seen.uptime_s > now.uptime_s else seen
        by_reach = {} if now is None else _times(now.loads, [] if was is None else was.loads)
        for reach, found in by_reach.items():
            times[reach].add(found)
        lines.append(_line(node, now, was, seen, _sum(by_reach.values()), after.volumes, seconds))
    asked = _grown(after.counters, before.counters, metadata_metrics.LOOKUP_KEYS)
    return StoreRates(
        seconds=seconds,
        cluster=after.cluster,
        shards=after.shards,
        lookups_per_s=_grown(after.counters, before.counters, metadata_metrics.LOOKUPS) / seconds,
        hit_ratio=_grown(after.counters, before.counters, metadata_metrics.LOOKUP_HIT_BLOCKS) / asked if asked else None,
        times=times,
        lines=lines,
        unreached=after.unreached,
    )


def as_data(found: StoreRates) -> dict[str, object]:
    """Convert the figures to JSON."""
    return {
        "seconds": found.seconds,
        "cluster": found.cluster.model_dump(mode="json"),
        "index": found.shards.model_dump(mode="json"),
        "lookups_per_s": found.lookups_per_s,
        "hit_ratio": found.hit_ratio,
        "loads": {reach: _times_data(times, found.seconds) for reach, times in found.times.items()},
        "nodes": [
            {
                "node_id": line.node_id,
                "state": line.state,
                "answered": line.answered,
                "loads": _times_data(line.times, found.seconds),
                "loaded_bytes_per_s": line.loaded,
                "data_plane_bytes_per_s": line.plane,
                "link_bytes_per_s": line.links,
                "loopback": line.loopback,
                "fill": {tier: {"used_bytes": used, "capacity_bytes": there} for tier, (used, there) in line.fill.items()},
                "queue_bytes": line.queue,
            }
            for line in found.lines
        ],
    }


def _servers(cluster: Cluster) -> str:
    """Format the metadata servers: the one in use, and how many there are and are away."""
    servers = cluster.metadata_servers
    if len(servers) < 2:
        return cluster.metadata_address
    used = ", ".join(one.address for one in servers if one.used) or "none"
    away = sum(one.state == "away" for one in servers)
    return f"{used} (of {len(servers)} metadata servers, {away} away)"


def summary(found: StoreRates) -> list[str]:
    """Format the summary of the store as lines."""
    cluster, all_times = found.cluster, found.all_times
    links = _added(line.links for line in found.lines)
    loopback = f"  {_LOOPBACK}: with other programs" if any(line.loopback for line in found.lines) else ""
    plane = _added(line.plane for line in found.lines)
    loaded = _added(line.loaded for line in found.lines)
    fill = {tier: [line.fill[tier] for line in found.lines if tier in line.fill] for tier in TIERS}
    refused = f" {cluster.nodes_refused} refused" if cluster.nodes_refused else ""
    hit = "-" if found.hit_ratio is None else f"{100 * found.hit_ratio:.1f}%"
    return [
        f"kvstore {_servers(cluster)}  {cluster.health}  up {output.duration(cluster.metadata_uptime_s)}"
        f"  nodes {cluster.nodes_alive} alive {cluster.nodes_silent} silent{refused}  plans {cluster.live_plans}"
        f"  policy {cluster.path_policy}",
        f"lookups  {found.lookups_per_s:.1f}/s  hit {hit}",
        *([f"index    {shard_summary(found.shards)}"] if found.shards.servers else []),
        f"loads    {all_times.loads / found.seconds:.1f}/s  p50 {_bound(all_times, 0.5)}  p99 {_bound(all_times, 0.99)}  "
        + "  ".join(
            f"{reach} {times.loads / found.seconds:.1f}/s {_bound(times, 0.99)}"
            for reach, times in found.times.items()
            if times.loads
        ),
        "loaded   " + "  ".join(f"{tier} {output.rate(loaded.get(tier, 0))}" for tier in REACHES[:3]),
        "plane    " + "  ".join(f"{way} {output.rate(plane.get(way, 0))}" for way in PLANE),
        "links    " + ("  ".join(f"{way} {output.rate(carried)}" for way, carried in sorted(links.items())) or "-") + loopback,
        "tiers    "
        + "  ".join(
            f"{tier} {output.size(sum(used for used, _ in known))}/{output.size(sum(there for _, there in known))}"
            for tier, known in fill.items()
            if known
        ),
    ]


HEADING: Final = (
    "node", "state", "loads/s", "p99", "from dram", "from nvme", "from peers", "served", "storage", "compute",
    "dram", "nvme", "queue",
)  # fmt: skip


def rows(found: StoreRates, order: str) -> list[tuple[str, ...]]:
    """Format one line per node, sorted by a key of ``ORDERS``."""
    return [
        (
            line.node_id,
            line.state if line.answered else f"{line.state}!",
            f"{line.loads_per_s:.1f}",
            _bound(line.times, 0.99),
            *(output.rate(line.loaded.get(tier, 0)) for tier in REACHES[:3]),
            output.rate(line.plane.get("served", 0)),
            *(_both(line, network) for network in ("storage", "compute")),
            *(_percent(line.fill.get(tier)) for tier in ("dram", "nvme")),
            output.size(line.queue),
        )
        for line in sorted(found.lines, key=ORDERS[order][1])
    ]


# ---- inside ----
def _state(node: Node) -> str:
    if node.refused is not None:
        return "refused"
    return "stopped" if node.stopped else node.state if node.alive else "silent"


def _line(
    node: Node,
    now: Activity | None,
    was: Activity | None,
    seen: Activity | None,
    times: LoadDurations,
    volumes: Sequence[Volume],
    seconds: float,
) -> Line:
    """Compute the line of a node.

    Process counters need an earlier sample of the same process (``was``, or None). NIC counters survive a restart (``seen``).
    """
    mine = [volume for volume in volumes if volume.node_id == node.node_id]
    return Line(
        node_id=node.node_id,
        state=_state(node),
        answered=now is not None,
        loads_per_s=times.loads / seconds,
        times=times,
        loaded=_rates(now, was, seconds, lambda one: one.loaded.model_dump()),
        plane=_rates(now, was, seconds, lambda one: {way: getattr(one.data_plane, f"{way}_bytes") for way in PLANE}),
        links=_rates(
            now,
            seen,
            seconds,
            lambda one: {
                f"{link.network} {way}": carried
                for link in one.links
                for way, carried in (("in", link.received_bytes), ("out", link.sent_bytes))
            },
        ),
        loopback=tuple(
            nic.network
            for nic in node.nics
            if now is not None and any(link.network == nic.network for link in now.links) and _on_loopback(nic.address)
        ),
        fill={
            tier: (
                sum(one.used_bytes for one in mine if one.tier == tier),
                sum(one.capacity_bytes for one in mine if one.tier == tier),
            )
            for tier in TIERS
            if any(one.tier == tier for one in mine)
        },
        queue=sum(nic.pending_bytes for nic in node.nics if nic.network == "storage"),
    )


def _rates(
    now: Activity | None, was: Activity | None, seconds: float, totals: Callable[[Activity], Mapping[str, int]]
) -> dict[str, float]:
    if now is None:
        return {}
    before = {} if was is None else totals(was)
    return {name: _difference(total, before.get(name, 0)) / seconds for name, total in totals(now).items()}


def _difference(now: int, before: int) -> int:
    return now - before if now >= before else now


def _grown(now: Mapping[str, int], before: Mapping[str, int], name: str) -> int:
    return _difference(now.get(name, 0), before.get(name, 0))


def _times(now: Iterable[LoadTimes], before: Iterable[LoadTimes]) -> dict[str, LoadDurations]:
    old = {one.reach: one for one in before}
    found = {}
    for one in now:
        was = old.get(one.reach)
        counts = {bucket.up_to_s: bucket.loads for bucket in was.buckets} if was is not None else {}
        buckets = {
            float("inf") if bucket.up_to_s is None else bucket.up_to_s: _difference(bucket.loads, counts.get(bucket.up_to_s, 0))
            for bucket in one.buckets
        }
        total_s = one.total_s - was.total_s if was is not None and was.total_s <= one.total_s else one.total_s
        found[str(one.reach)] = LoadDurations(sum(buckets.values()), total_s, buckets)
    return found


def _sum(times: Iterable[LoadDurations]) -> LoadDurations:
    made = LoadDurations()
    for one in times:
        made.add(one)
    return made


def _times_data(times: LoadDurations, seconds: float) -> dict[str, float | None]:
    found = {"per_s": times.loads / seconds, "mean_s": times.total_s / times.loads if times.loads else None}
    return found | {name: _finite(times.quantile(part)) for name, part in (("p50_up_to_s", 0.5), ("p99_up_to_s", 0.99))}


def _finite(bound: float | None) -> float | None:
    return None if bound == float("inf") else bound


def _bound(times: LoadDurations, part: float) -> str:
    """Format the bounds of the bucket that contains a quantile. The histogram is not finer."""
    found = times.quantile(part)
    if found is None:
        return output.NOTHING
    below = max((bound for bound in times.buckets if bound < found), default=0.0)
    if found == float("inf"):
        return f">{output.duration(below)}"
    return f"{output.duration(below)}-{output.duration(found)}" if below else f"<{output.duration(found)}"


def _added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    made: dict[str, float] = {}
    for part in parts:
        for name, rate in part.items():
            made[name] = made.get(name, 0.0) + rate
    return made


def _on_loopback(address: str) -> bool:
    try:
        return stays_on_host(address)
    except InvalidArgument:  # a node may report anything
        return False


def _both(line: Line, network: str) -> str:
    known = [line.links[f"{network} {way}"] for way in ("in", "out") if f"{network} {way}" in line.links]
    return "+".join(output.rate(rate) for rate in known) + (f" {_LOOPBACK}" if known and network in line.loopback else "")


def _fill(fill: tuple[int, int] | None) -> float:
    return fill[0] / fill[1] if fill is not None and fill[1] else 0.0


def _percent(fill: tuple[int, int] | None) -> str:
    return "" if fill is None else output.share(*fill)
