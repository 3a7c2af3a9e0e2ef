"""Findings on running servers: required servers that do not answer, and the I/O engines in use. Pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.doctor.contract import Finding, Level
from kvstore.doctor.findings import NOFILE_LEAST
from kvstore.health.server_indexes import differing_indexes
from kvstore.observe.metric_definitions import volumes as volumes_metrics

_TROUBLE = ("_errors_total", "_failures_total", "_corrupt_blocks_total", "_refused_total", "_stalled_total", "_given_up_total")
_TROUBLE_TOO = (
    volumes_metrics.GDS_PRETENDED,
    volumes_metrics.GDS_NOT_USABLE,
    volumes_metrics.NVME_OPENED_READ_ONLY,
    volumes_metrics.DEVICE_READS_BOUNCED,
)

_LOOK_AT_NIXL = (
    "kvstore doctor --set node.nixl=required --set node.nixl_trusted_network=true   # what is missing for it, and how to fix it"
)

_BUILD_KERNEL = "sudo apt install gcc   # then install the package again and start the node again; its log names the cause"


class Answer(StrEnum):
    """The result of a call to a server."""

    GIVEN = "given"
    REFUSED = "refused"
    """The server runs but rejects the token."""
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMetadata:
    """A metadata server that the configuration names."""

    address: str
    setting: str
    """The setting with its address, e.g. ``client.metadata``."""
    required: bool
    """The address is configured, not the default."""
    answer: Answer = Answer.GIVEN
    error: str | None = None
    nodes: int = 0
    nodes_alive: int = 0
    index_epoch: str = ""
    """In hex; empty: unknown."""


@dataclass(frozen=True, slots=True)
class RunningNode:
    """Status of a node, or the error if it did not answer."""

    address: str
    node_id: str = ""
    io_engines: Sequence[str] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None
    answer: Answer = Answer.GIVEN
    required: bool = False
    """The node is configured; no answer is an error."""
    volumes: Sequence[str] = ()
    """NVMe volumes."""
    open_files: int | None = None
    """Limit of open files of the node's process; None: unknown or unlimited."""


def metadata_findings(servers: Sequence[RunningMetadata]) -> Iterator[Finding]:
    """Report each configured metadata server: reached, rejecting the token, or silent."""
    answering = {server.setting for server in servers if server.answer is Answer.GIVEN}
    for setting in dict.fromkeys(server.setting for server in servers):
        epochs = {server.address: bytes.fromhex(server.index_epoch) for server in servers if server.setting == setting}
        found = differing_indexes({address: epoch for address, epoch in epochs.items() if epoch})
        if found is not None:
            fix = "kvstore config show | grep metadata.engine   # on the host of each server: it must be the same"
            yield Finding("metadata server", Level.MISSING, f"{setting}: {found.facts}", fix)
    for server in servers:
        named = f"{server.address} ({server.setting})"
        if server.answer is Answer.GIVEN:
            message = f"{named} answers: {server.nodes_alive} of {server.nodes} nodes alive"
            if server.nodes_alive < server.nodes:
                yield Finding(
                    "metadata server", Level.WARNING, message, "kvstore status --detail   # names the nodes and the causes"
                )
            else:
                yield Finding("metadata server", Level.OK, message)
        elif server.answer is Answer.REFUSED:
            message = f"{named} answers, but rejects the call: {server.error}"
            yield Finding("metadata server", Level.WARNING, message, _token_of(server.setting))
        elif server.required and server.setting in answering:
            message = f"{named} does not answer: {server.error}; calls go to the other servers of this setting"
            yield Finding("metadata server", Level.WARNING, message, "kvstore health metadata   # on its host")
        elif server.required:
            message = f"{named} does not answer: {server.error}"
            yield Finding("metadata server", Level.MISSING, message, "kvstore health metadata   # on its host")
        else:
            message = f"none answers at {server.address}, the default of {server.setting}"
            yield Finding(
                "metadata server", Level.INFO, message, "kvstore up   # starts a store on this host; --metadata names another's"
            )


def _token_of(setting: str) -> str:
    section = setting.partition(".")[0]
    role = "node" if section == "node" else "operator or read"
    return f"--set {section}.token_file=/etc/kvstore/token   # a token of the role {role}"


def nodes_findings(
    nodes: Sequence[RunningNode], folders: Sequence[str], closed: Sequence[str], *, gds_required: bool = False
) -> Iterator[Finding]:
    """Report the nodes of this host.

    Args:
        nodes: nodes found by socket, or named by the configuration.
        folders: searched for sockets.
        closed: folders that this user cannot read.
        gds_required: the configuration asks for GPUDirect Storage.
    """
    for folder in closed:
        message = f"this user cannot read {folder}: nodes with a socket there are not found"
        yield Finding("node", Level.WARNING, message, "sudo kvstore doctor")
    for node in nodes:
        yield from node_findings(node, gds_required=gds_required)
    if not nodes and not closed:
        message = f"no node runs on this host: no socket in {', '.join(folders)}"
        yield Finding("node", Level.INFO, message, "kvstore node   # starts one; others are looked at with --node HOST:PORT")


def node_findings(node: RunningNode, *, gds_required: bool = False) -> Iterator[Finding]:
    """Report the I/O paths that a running node uses.

    Args:
        node: its answer.
        gds_required: its configuration asks for GPUDirect Storage.
    """
    area = f"node {node.node_id}" if node.node_id else "node"
    if node.answer is Answer.REFUSED:
        yield Finding(area, Level.WARNING, f"{node.address}: it runs, but rejects the call: {node.error}", _token_of("client"))
        return
    if node.error is not None:
        level = Level.MISSING if node.required else Level.WARNING
        fix = "kvstore health node   # on its host; its log names its address"
        yield Finding(area, level, f"{node.address}: no answer ({node.error})", fix)
        return
    for line in node.io_engines:
        yield _judge(area, line, gds_required)
    if node.open_files is not None and node.open_files < NOFILE_LEAST:
        message = f"limit of open files: {node.open_files}; a quarter of it bounds the connections of each address"
        yield Finding(area, Level.WARNING, message, "ulimit -H -n   # systemd: LimitNOFILE=1048576")
    trouble = {
        name: count
        for name, count in sorted(node.counters.items())
        if count and (name.endswith(_TROUBLE) or name in _TROUBLE_TOO)
    }
    if trouble:
        counted = ", ".join(f"{name.removesuffix('_total')} {count}" for name, count in trouble.items())
        fix = f"kvstore doctor --node {shlex.quote(node.address)} -o json   # all it counts; its log says more"
        yield Finding(area, Level.WARNING, f"since it started: {counted}", fix)
    else:
        yield Finding(area, Level.OK, "no errors since it started")


def _judge(area: str, line: str, gds_required: bool) -> Finding:
    if line.startswith("GPUDirect Storage of "):
        if ": real " in line:
            return Finding(area, Level.OK, line)
        return Finding(area, Level.MISSING if gds_required else Level.INFO, line)
    if line.startswith("copies and checksums: in Python"):
        return Finding(area, Level.WARNING, line, _BUILD_KERNEL)
    if line.startswith("NIXL: not in use"):
        message = f"{line}; blocks move over TCP"
        return Finding(area, Level.WARNING, message, _LOOK_AT_NIXL)
    if "read-only" in line:
        return Finding(area, Level.WARNING, line, "df -h; dmesg | tail   # it stores again once the disk takes writes")
    if "refused" in line or "left alone" in line:
        return Finding(area, Level.WARNING, line)
    return Finding(area, Level.OK, line)
