"""``kvstore doctor``: checks of this host, with the command that fixes each problem."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Final

import click

from kvstore.cli.commands.host.index_probe import running_index
from kvstore.cli.support import param_types
from kvstore.cli.support.build_config import token
from kvstore.cli.support.config_options import cluster_option, configuration, setting_option, with_quiet_config
from kvstore.cli.support.folders import node_socket, socket_folders
from kvstore.cli.support.help import Command
from kvstore.cli.support.host_settings import settle
from kvstore.cli.support.result import CommandOutput, prints
from kvstore.cli.support.store_client import metadata_option
from kvstore.config.base import TlsSection
from kvstore.config.client import ClientSection
from kvstore.config.model import Config
from kvstore.config.node import NodeSection
from kvstore.config.sources import Provenance, leaves
from kvstore.core.errors import KVStoreError, PermissionDenied, Unauthenticated
from kvstore.doctor.contract import Finding, Level
from kvstore.doctor.facts import ProbeResults, Requirements, Section, WantedNixl, WantedTls, WantedVolume
from kvstore.doctor.findings import findings, healthy
from kvstore.doctor.servers.daemon_findings import Answer, RunningMetadata, RunningNode, metadata_findings, nodes_findings
from kvstore.doctor.servers.local_nodes import sockets_in
from kvstore.doctor.servers.shard_findings import index_findings
from kvstore.doctor.verdict import verdict
from kvstore.process.host_defaults import NodeDefaults
from kvstore.process.memory.memory_sizing import USUAL_BLOCK_BYTES
from kvstore.process.tls import TlsConfig
from kvstore.rpc.address import stays_on_host
from kvstore.transport.nixl.agent import LOOPBACK

_ANSWER_S: Final = 2.0
_MOST_NODES: Final = 8
_STYLES = {Level.OK: "green", Level.INFO: "dim", Level.WARNING: "yellow", Level.MISSING: "bold red"}


@click.command(cls=Command)
@setting_option("--nvme", key="node.nvme", metavar="PATH:SIZE,…", help="NVMe volumes to check.")
@setting_option("--dram", key="node.dram", metavar="SIZE", help="Size of the DRAM arena to check for.")
@setting_option("--node", key="client.node", metavar="ADDR", help="Running node to check: address, or unix:PATH.")
@click.option(
    "--block-size",
    callback=param_types.some_size,
    metavar="SIZE",
    help="Block size for the estimate of a full node's memory (default: 1MiB).",
)
@metadata_option
@cluster_option
@with_quiet_config
@prints
def doctor(config: Config, *, block_size: int | None) -> CommandOutput:
    """Check this host: hardware, drivers, configuration and running daemons. Nothing is changed.

    It looks at the GPU and its driver, GPUDirect Storage, the volumes of the configuration, memory, limits, networks, RDMA,
    certificates, the clock, at the metadata server that the configuration names, at the Valkey Cluster of metadata.engine, and
    at the nodes that run here. Nodes are found by their unix sockets, so they are found without a metadata server. The last
    lines are a verdict and the three actions that help most.

    Examples:
      kvstore doctor
      kvstore doctor --config /etc/kvstore/kvstore.toml
      kvstore doctor --cluster prod
      kvstore doctor --set metadata.engine=valkey://10.0.0.11:6379,10.0.0.12:6379
      kvstore doctor --nvme /mnt/nvme0/kvstore:1TiB --set node.gds=required
      kvstore doctor -o json | jq '.findings[] | select(.level != "ok")'

    Exit codes: 0 no error, perhaps warnings; 1 the configuration requires something that is missing, or a server that it names
    does not answer; 2 usage error.
    """
    from kvstore.doctor.collect import collect

    _, provenance = configuration(click.get_current_context())
    wanted = wanted_of(config, provenance, block_size)
    servers, known = metadata_servers(config, provenance)
    folders = socket_folders(config)
    nodes, closed = running_nodes(config, known, folders)
    index = running_index(config, provenance)
    sections = dict(collect(wanted).sections)
    sections["running"] = Section({"volumes": sorted({volume for node in nodes for volume in node.volumes})})
    facts = ProbeResults(sections)
    found = [
        configuration_finding(provenance),
        *findings(facts, wanted),
        *metadata_findings(servers),
        *index_findings(index),
        *nodes_findings(nodes, list(map(str, folders)), list(map(str, closed)), gds_required=wanted.gds == "required"),
    ]
    warnings, missing = (sum(finding.level is level for finding in found) for level in (Level.WARNING, Level.MISSING))
    summary = verdict(found)
    section_facts = {name: {"error": one.error, **one.said} for name, one in facts.sections.items()}
    document: dict[str, Any] = {"ok": healthy(found), "warnings": warnings, "missing": missing}
    document |= {"verdict": summary.line, "actions": list(summary.actions)}
    document |= {"findings": [asdict(finding) for finding in found], "facts": section_facts}
    document |= {"metadata_servers": [asdict(server) for server in servers], "nodes": [asdict(node) for node in nodes]}
    document |= {"index": asdict(index)}

    def show() -> None:
        (_print_table if sys.stdout.isatty() else _print_lines)(found)
        click.echo("")
        click.echo(summary.line)
        for number, action in enumerate(summary.actions, start=1):
            click.echo(f"  {number}. {action}")

    return (
        CommandOutput(document, show)
        if healthy(found)
        else CommandOutput(document, show, 1, "a requirement of the configuration is missing")
    )


def configuration_finding(provenance: Provenance) -> Finding:
    """Say whose settings are checked. Processes that run may have been started with others."""
    sources: dict[str, None] = {}
    for origin in provenance.values():
        if origin.source in ("file", "environment", "flag"):
            sources[origin.detail] = None
    given = ", ".join(sources) or "no file and no flag: the defaults"
    return Finding(
        "configuration", Level.OK, f"checks the settings of {given}; a running store may have been started with others"
    )


def wanted_of(config: Config, provenance: Provenance, block_bytes: int | None = None) -> Requirements:
    """Requirements of the configuration."""
    settled, origins = settle(config, provenance)
    node = settled.node
    return Requirements(
        dram_bytes=node.dram_bytes,
        huge_pages=bool(node.huge_pages),
        huge_pages_refused=config.node.huge_pages is False,
        block_bytes=block_bytes or USUAL_BLOCK_BYTES,
        defaults=tuple(_defaults(settled, origins)),
        tls=tuple(_certificates(config)),
        gds=node.gds,
        volumes=tuple(WantedVolume(volume.path, volume.capacity_bytes, volume.direct) for volume in node.nvme),
        mounts=tuple(mount.path for mount in node.mounts),
        nixl=None if node.nixl == "off" else _wanted_nixl(node),
    )


def _defaults(settled: Config, origins: Provenance) -> Iterator[str]:
    """Derived settings of a node, each with value and reason."""
    derived = {f"node.{one.name}" for one in fields(NodeDefaults)}
    for leaf in leaves(settled, origins):
        if leaf.key in derived and leaf.origin.source == "derived":
            yield f"{leaf.key} = {leaf.text} {leaf.origin.detail}"


def _certificates(config: Config) -> Iterator[WantedTls]:
    for section in ("metadata", "node", "client", "router", "admin"):
        files: TlsSection = getattr(config, section).tls
        if files.ca or files.cert:
            yield WantedTls(section, files.ca, files.cert, files.key)


def _wanted_nixl(node: NodeSection) -> WantedNixl:
    listens = (node.data_listen, node.storage_listen or node.data_listen)
    return WantedNixl(
        required=node.nixl == "required",
        trusted=node.nixl_trusted_network,
        ruled_out="tls" if node.tls.resolve() is not None else "compute_cap" if node.compute_cap else None,
        devices=node.nixl_devices or (LOOPBACK if all(map(stays_on_host, listens)) else ""),
        transports=node.nixl_transports,
    )


def metadata_servers(config: Config, provenance: Provenance) -> tuple[list[RunningMetadata], list[tuple[str, str]]]:
    """Ask each configured metadata server, with TLS and token of its section.

    Returns:
        The answer of each server; and id and address of the living nodes that they report on this host.
    """
    asked: list[tuple[str, str, ClientSection | NodeSection]] = [("client.metadata", config.client.metadata, config.client)]
    if config.node.metadata is not None and provenance["node.metadata"].source != "default":
        asked.append(("node.metadata", config.node.metadata, config.node))
    if len(asked) > 1 and provenance["client.metadata"].source == "default":
        del asked[0]  # the default of the client does not matter on the host of a configured node
    servers, known = [], {}
    for setting, address, section in asked:
        for one, tls in _servers_at(address, section.tls.resolve()):
            server, nodes = _ask_metadata(setting, one, section, tls, required=provenance[setting].source != "default")
            servers.append(server)
            known.update(nodes)
    return servers, [(node_id, address) for node_id, address in known.items() if _is_ours(address)]


def _servers_at(setting: str, tls: TlsConfig | None) -> Iterator[tuple[str, TlsConfig | None]]:
    """Yield the address of each metadata server that a setting names, and the TLS files to reach it. Resolves DNS names."""
    from kvstore.rpc.failover.addresses import MetadataAddresses
    from kvstore.rpc.failover.resolver import resolve, system_resolver

    given = MetadataAddresses.parse(setting)
    for entry in given.entries:
        found = []
        if entry in given.names:
            with suppress(OSError, UnicodeError):  # the call says that the name is not known
                found = resolve(entry, system_resolver)
        if len(found) < 2:
            yield entry, tls
            continue
        name = entry.rpartition(":")[0]
        for address in found:
            yield address, tls if tls is None or tls.server_name else replace(tls, server_name=name)


def _ask_metadata(
    setting: str, address: str, section: ClientSection | NodeSection, tls: TlsConfig | None, *, required: bool
) -> tuple[RunningMetadata, dict[str, str]]:
    from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
    from kvstore.rpc.client import call, connect

    try:
        with connect(address, tls=tls, token=token(section)) as channel:
            stub = metadata_pb2_grpc.MetadataStub(channel)
            known = call(stub.ListNodes, metadata_pb2.ListNodesRequest(), _ANSWER_S).nodes
            epoch = b""
            with suppress(PermissionDenied):
                epoch = call(stub.GetStats, metadata_pb2.GetStatsRequest(), _ANSWER_S).index_epoch
    except (KVStoreError, OSError) as error:
        answer, why = _answered(error, address, section)
        return RunningMetadata(address=address, setting=setting, required=required, answer=answer, error=why), {}
    known = [status for status in known if status.node.control_address]  # caches of engines serve no calls
    alive = {status.node.node_id: status.node.control_address for status in known if status.alive}
    running = RunningMetadata(
        address=address,
        setting=setting,
        required=required,
        nodes=len(known),
        nodes_alive=len(alive),
        index_epoch=epoch.hex(),
    )
    return running, alive


def _answered(error: Exception, address: str, section: ClientSection | NodeSection) -> tuple[Answer, str]:
    """Tell a server that rejected a call from one that did not answer, with the reason."""
    from kvstore.rpc.diagnosis import diagnose

    name = "node" if isinstance(section, NodeSection) else "client"
    if isinstance(error, Unauthenticated):
        file = section.token_file
        why = f"{name}.token_file is not set" if file is None else f"the token in {file} is not known"
        return Answer.REFUSED, f"a token is required ({why})"
    if isinstance(error, PermissionDenied):
        return Answer.REFUSED, str(error)
    return Answer.NONE, diagnose(address, section.tls.resolve(), f"[{name}.tls]") or str(error)


def running_nodes(
    config: Config, known: Sequence[tuple[str, str]], folders: Sequence[Path]
) -> tuple[list[RunningNode], list[Path]]:
    """Ask the nodes with a socket in the configured node's folder, and the nodes of this host that metadata servers report.

    If no node runs in the configured node's folder, those with a socket in ``folders`` are asked.

    Args:
        config: TLS and token for the calls.
        known: id and address of nodes that metadata servers report on this host.
        folders: searched for sockets.

    Returns:
        The nodes, and the folders that this user cannot read.
    """
    if config.client.node:
        return [replace(_ask_node(config, config.client.node), required=True)], []
    sockets, closed = sockets_in([node_socket(config).parent])
    if all(one.error is not None for one in sockets):
        sockets, closed = sockets_in(folders)
    found = [replace(_ask_node(config, f"unix:{one.path}"), open_files=one.open_files) for one in sockets if one.error is None]
    seen = {node.node_id or Path(node.address).stem for node in found}
    found += [_ask_node(config, address) for node_id, address in known if node_id not in seen]
    return found[:_MOST_NODES], closed


def _ask_node(config: Config, address: str) -> RunningNode:
    from kvproto.v1 import common_pb2, node_pb2, node_pb2_grpc
    from kvstore.rpc.client import call, connect

    try:
        with connect(address, tls=config.client.tls.resolve(), token=token(config.client)) as channel:
            said = call(node_pb2_grpc.NodeStub(channel).GetNodeStats, node_pb2.GetNodeStatsRequest(), _ANSWER_S)
    except (KVStoreError, OSError) as error:
        answer, why = _answered(error, address, config.client)
        return RunningNode(address, error=why, answer=answer)
    return RunningNode(
        address,
        said.node.node_id,
        tuple(said.io_engines),
        dict(said.counters),
        volumes=tuple(volume.volume_id for volume in said.node.volumes if volume.tier == common_pb2.TIER_NVME),
    )


def _is_ours(address: str) -> bool:
    """Whether an address belongs to this host, which is if it can be bound."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def _print_table(found: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    for column in ("", "area", "finding"):
        table.add_column(column, overflow="fold")
    for finding in found:
        message = Text(finding.message)
        if finding.fix:
            message.append(f"\n→ {finding.fix}", style="cyan")
        table.add_row(Text(finding.level.value, style=_STYLES[finding.level]), finding.area, message)
    Console().print(table)


def _print_lines(found: Sequence[Finding]) -> None:
    for finding in found:
        click.echo(
            f"{finding.level.value:<7}  {finding.area}: {finding.message}" + (f"  -> {finding.fix}" if finding.fix else "")
        )
