"""Findings on a node that runs: what is really in use, by its own words. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.doctor.findings import Finding, Level

_TROUBLE = ("_errors_total", "_failures_total", "_corrupt_blocks_total", "_refused_total", "_stalled_total", "_given_up_total")
_TROUBLE_TOO = ("gds_pretended_total", "gds_not_usable_total", "nvme_opened_read_only_total", "device_reads_bounced_total")

_LOOK_AT_NIXL = (
    "kvstore doctor --set node.nixl=required --set node.nixl_trusted_network=true   # what is missing for it, and what mends it"
)


@dataclass(frozen=True, slots=True)
class RunningNode:
    """What a node said, or why it said nothing."""

    address: str
    node_id: str = ""
    io_engines: Sequence[str] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None


def node_findings(node: RunningNode, *, gds_required: bool = False) -> Iterator[Finding]:
    """What a running node has in use.

    Args:
        node: what it said.
        gds_required: its configuration asks for GPUDirect Storage.
    """
    area = f"node {node.node_id}" if node.node_id else "node"
    if node.error is not None:
        yield Finding(
            area,
            Level.WARNING,
            f"{node.address}: no answer ({node.error})",
            "kvstore node   # starts one; where it runs, its log says at which address",
        )
        return
    for line in node.io_engines:
        yield _judge(area, line, gds_required)
    trouble = {
        name: count
        for name, count in sorted(node.counters.items())
        if count and (name.endswith(_TROUBLE) or name in _TROUBLE_TOO)
    }
    if trouble:
        counted = ", ".join(f"{name.removesuffix('_total')} {count}" for name, count in trouble.items())
        mend = f"kvstore doctor --node {shlex.quote(node.address)} --json   # all it counts; its log says more"
        yield Finding(area, Level.WARNING, f"since it started: {counted}", mend)
    else:
        yield Finding(area, Level.OK, "no errors since it started")


def _judge(area: str, line: str, gds_required: bool) -> Finding:
    if line.startswith("GPUDirect Storage of "):
        if ": real " in line:
            return Finding(area, Level.OK, line)
        return Finding(area, Level.MISSING if gds_required else Level.INFO, line)
    if line.startswith("NIXL: not in use"):
        what = f"{line}; blocks move over TCP"
        return Finding(area, Level.WARNING, what, _LOOK_AT_NIXL)
    if "read-only" in line:
        return Finding(area, Level.WARNING, line, "df -h; dmesg | tail   # it stores again once the disk takes writes")
    if "refused" in line or "left alone" in line:
        return Finding(area, Level.WARNING, line)
    return Finding(area, Level.OK, line)
