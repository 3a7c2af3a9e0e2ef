"""``kvstore nodes``: list, inspect, drain and remove nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from kvstore.cli.commands.store.drain import drain, remove, undrain
from kvstore.cli.support import output, result
from kvstore.cli.support.help import Resource
from kvstore.cli.support.result import CommandOutput
from kvstore.cli.support.store_client import StoreConnection, ask, complete_nodes, store_query
from kvstore.config.model import Config

if TYPE_CHECKING:
    from kvstore.control_api.schemas.store import Nic, Node, NodeDetail, Volume

_BOOT_DIGITS = 8


@click.group(cls=Resource)
def nodes() -> None:
    """List, inspect, drain and remove nodes. Without a command, list them.

    Examples:
      kvstore nodes
      kvstore nodes show host-1
      kvstore nodes drain host-1 --wait
    """


nodes.add_command(drain)
nodes.add_command(undrain)
nodes.add_command(remove)


@nodes.command("list")
@store_query
def list_nodes(config: Config) -> CommandOutput:
    """List the nodes with state, roles, usage by tier, links and queues.

    Links are storage and compute, with the bandwidth that the planner uses: configured, measured or reported by the kernel.
    `(assumed)` marks an unknown bandwidth. The queue counts the bytes of planned reads over the storage link that
    are not reported as finished.

    Examples:
      kvstore nodes list
      kvstore nodes list --watch 5
      kvstore nodes list | grep -v active
      kvstore nodes list -o json | jq -r '.items[] | select(.alive | not) | .node_id'
    """

    async def found(store: StoreConnection) -> tuple[list[Node], list[Volume]]:
        return await store.queries.nodes(), await store.queries.volumes(await store.queries.known_volumes())

    known, volumes = ask(config, found)
    return result.table(
        known,
        ("node", "state", "roles", "hbm", "dram", "nvme", "storage", "compute", "queue", "boot", "drain"),
        [_row(node, [volume for volume in volumes if volume.node_id == node.node_id]) for node in known],
    )


@nodes.command("show")
@click.argument("node", shell_complete=complete_nodes)
@store_query
def show_node(config: Config, *, node: str) -> CommandOutput:
    """Show a node: its record at the metadata server, and its own statistics.

    Examples:
      kvstore nodes show host-1
      kvstore nodes show host-1 -o json | jq .process.write_back_waiting_blocks
    """
    found = ask(config, lambda store: store.queries.node(node))
    return result.facts(found, _facts(found))


def state_of(node: Node) -> str:
    """State of a node in one word."""
    if node.refused is not None:
        return "refused"
    if node.stopped:
        return "stopped"
    return node.state if node.alive else f"silent:{output.duration(node.heartbeat_age_s)}"


def fill_of(volumes: list[Volume], tier: str) -> str:
    """Usage of a node's volumes in a tier; empty if there is none."""
    found = [volume for volume in volumes if volume.tier == tier]
    if not found:
        return ""
    used, capacity = sum(one.used_bytes for one in found), sum(one.capacity_bytes for one in found)
    return f"{output.size(used)}/{output.size(capacity)}"


def drain_of(node: Node) -> str:
    """Progress of a drain."""
    if node.drain is None:
        return ""
    said = [f"{node.drain.not_durable_blocks} not durable"]
    if node.drain.move:
        said.append(f"{node.drain.left_blocks} to move")
    return ", ".join([*said, *([node.drain.why] if node.drain.why else [])])


def _row(node: Node, volumes: list[Volume]) -> list[str]:
    storage, compute = (
        next((nic for nic in node.nics if nic.network == network and nic.planned_bytes_per_s), None)
        for network in ("storage", "compute")
    )
    return [
        node.node_id,
        state_of(node),
        ",".join(node.roles),
        *(fill_of(volumes, tier) for tier in ("hbm", "dram", "nvme")),
        *("" if nic is None else _planned(nic) for nic in (storage, compute)),
        output.size(sum(nic.pending_bytes for nic in node.nics if nic.network == "storage")),
        node.boot_id[:_BOOT_DIGITS],
        drain_of(node),
    ]


_SOURCES: Final = {
    None: "{}",
    "configured": "{} (configured)",
    "measured": "{} (measured)",
    "link": "{} (speed of the link)",
    "assumed": "{} (assumed: neither configured nor measured)",
}


def _planned(nic: Nic) -> str:
    """Bandwidth that the planner assumes for a link."""
    mark = "(assumed)" if nic.planned_source == "assumed" else ""
    return f"{output.rate(nic.planned_bytes_per_s or 0)}{mark}"


def _bandwidth(nic: Nic) -> str:
    """Bandwidth that the planner assumes for a link, with its source."""
    if nic.planned_bytes_per_s is None:
        return "no loads planned over it: the planner does not know the node"
    return "bandwidth " + _SOURCES[nic.planned_source].format(output.rate(nic.planned_bytes_per_s))


def _facts(node: NodeDetail) -> list[tuple[str, str]]:
    rows = [
        ("node", node.node_id),
        ("state", state_of(node)),
        ("drain", drain_of(node)),
        ("heartbeat", f"{output.duration(node.heartbeat_age_s)} ago"),
        ("boot", node.boot_id),
        ("roles", ",".join(node.roles)),
        ("control", node.control_address),
        *(
            (
                f"{nic.network} link",
                f"{nic.address}, {_bandwidth(nic)}, {output.size(nic.pending_bytes)} waiting",
            )
            for nic in node.nics
        ),
        ("volumes", ", ".join(node.volumes)),
        ("mounts", ", ".join(node.mounts)),
    ]
    if node.process is None:
        return [*rows, ("does not answer", node.unreached or "")]
    process = node.process
    cap = process.traffic_cap_bytes_per_s
    return [
        *rows,
        ("version", process.version),
        ("up", output.duration(process.uptime_s)),
        ("sessions", str(process.sessions)),
        ("blocks", f"{process.blocks:,}"),
        ("to become durable", f"{process.write_back_waiting_blocks:,} blocks"),
        ("to be published", f"{process.publish_waiting_events:,} changes"),
        *((one.name, f"{output.size(one.used_bytes)} used, {one.waiting_loads} loads wait") for one in process.staging),
        (
            "traffic cap",
            "none; requires node.compute_cap at the start of the node" if cap is None else output.rate(cap) if cap else "none",
        ),
        (
            "hints",
            "off (node.hint_share = 0)"
            if process.hints_off
            else f"{process.hinted_sessions:,} sessions, {output.size(process.hinted_bytes)} protected",
        ),
        *([("read ahead", "off (node.read_ahead = 0)")] if process.read_ahead_off else []),
        ("I/O", "; ".join(process.io_engines)),
    ]
