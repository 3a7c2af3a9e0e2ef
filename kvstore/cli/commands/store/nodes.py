"""``kvstore nodes`` and ``kvstore volumes``: list, inspect, evict and check."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Final

import click

from kvstore.cli.support import output, param_types
from kvstore.cli.support.help import Command, Group
from kvstore.cli.support.store_client import (
    EXIT_IN_PART,
    Store,
    ask,
    complete_nodes,
    complete_volumes,
    confirm,
    json_option,
    lists,
    store_options,
    yes_option,
)
from kvstore.config.model import Config

if TYPE_CHECKING:
    from kvstore.control_api.schemas.store import Nic, Node, NodeDetail, Volume
    from kvstore.control_api.volume_checks import VolumeCheck

_BOOT_DIGITS = 8
_POLL_S = 0.3


@click.group(cls=Group, invoke_without_command=True)
@json_option
@store_options
def nodes(config: Config, *, as_json: bool) -> None:
    """List the nodes with state, roles, usage by tier, links and queues.

    Links are storage and compute, with the bandwidth that the planner uses: configured, measured or reported by the kernel.
    `(assumed)` marks an unknown bandwidth. The queue counts the bytes of planned reads over the storage link that
    are not reported as finished.

    Examples:
      kvstore nodes
      kvstore nodes | grep -v active
      kvstore nodes --json | jq -r '.items[] | select(.alive | not) | .node_id'
      kvstore nodes show host-1
    """
    if not lists(click.get_current_context(), as_json):
        return

    async def found(store: Store) -> tuple[list[Node], list[Volume]]:
        return await store.queries.nodes(), await store.queries.volumes(await store.queries.known_volumes())

    if as_json:
        known = ask(config, lambda store: store.queries.nodes())
        output.as_json({"items": [node.model_dump(mode="json") for node in known]})
        return
    known, volumes = ask(config, found)
    output.table(
        ("node", "state", "roles", "hbm", "dram", "nvme", "storage", "compute", "queue", "boot", "drain"),
        [_row(node, [volume for volume in volumes if volume.node_id == node.node_id]) for node in known],
    )


@nodes.command("show", cls=Command)
@click.argument("node", shell_complete=complete_nodes)
@json_option
@store_options
def show_node(config: Config, *, node: str, as_json: bool) -> None:
    """Show a node: its record at the metadata server, and its own statistics.

    Examples:
      kvstore nodes show host-1
      kvstore nodes show host-1 --json | jq .process.write_behind_waiting_blocks
    """
    found = ask(config, lambda store: store.queries.node(node))
    if as_json:
        output.as_json(found)
    else:
        output.facts(_facts(found))


@click.group(cls=Group, invoke_without_command=True)
@click.option("--node", metavar="NODE", shell_complete=complete_nodes, help="Only volumes of this node.")
@json_option
@store_options
def volumes(config: Config, *, node: str | None, as_json: bool) -> None:
    """List the volumes of running nodes with tier, usage, blocks and whether they are writable.

    Use kvstore volume for volumes that no node has open.

    Examples:
      kvstore volumes
      kvstore volumes --node host-1 --json | jq '.items[] | select(.read_only)'
      kvstore volumes evict host-1/nvme0 --to 50
    """
    if not lists(click.get_current_context(), as_json, node):
        return

    async def found(store: Store) -> list[Volume]:
        if node is not None:
            await store.rpc.node(node)  # an unknown id is an error, not an empty list
        return await store.queries.volumes(await store.queries.known_volumes(node))

    known = ask(config, found)
    if as_json:
        output.as_json({"items": [volume.model_dump(mode="json") for volume in known]})
        return
    output.table(
        ("volume", "tier", "used", "capacity", "fill", "blocks", "bad", "takes blocks"),
        [
            (
                one.volume_id,
                one.tier,
                output.size(one.used_bytes),
                output.size(one.capacity_bytes),
                output.share(one.used_bytes, one.capacity_bytes),
                str(one.blocks),
                "" if one.quarantined_blocks is None else str(one.quarantined_blocks),
                f"no: {one.read_only}" if one.read_only else "yes" if one.node_alive else "no: its node does not report",
            )
            for one in known
        ],
    )


@volumes.command(cls=Command)
@click.argument("volume", shell_complete=complete_volumes)
@click.option("--to", "percent", type=click.IntRange(0, 100), required=True, help="Target usage in percent.")
@yes_option
@json_option
@store_options
def evict(config: Config, *, volume: str, percent: int, yes: bool, as_json: bool) -> None:
    """Evict the coldest blocks of VOLUME (NODE/NAME) down to a usage.

    Blocks in use and dirty DRAM blocks stay. Asks for confirmation.

    Examples:
      kvstore volumes evict host-1/nvme0 --to 50
      kvstore volumes evict host-1/dram --to 0 --yes
    """
    node_id, name = _parts(volume)
    confirm(f"Evict the coldest blocks of {volume} down to {percent} % of its capacity", yes=yes)
    done = ask(config, lambda store: store.commands.evict_volume(node_id, name, percent))
    if as_json:
        output.as_json(done)
    else:
        kept = f", {done.kept_blocks:,} stay as they are in use or not durable" if done.kept_blocks else ""
        output.line(f"{volume}: {done.evicted_blocks:,} blocks evicted{kept}; {output.size(done.used_bytes)} used")


@volumes.command(cls=Command)
@click.argument("volume", shell_complete=complete_volumes)
@click.option("--wait", is_flag=True, help="Wait for the end of the check. Ctrl-C does not cancel it.")
@click.option("--status", "look", is_flag=True, help="Show progress or result; begin no check.")
@click.option("--cancel", is_flag=True, help="Cancel the check in progress.")
@click.option(
    "--rate",
    callback=param_types.some_size,
    metavar="SIZE",
    help="Read rate limit per second (default: a tenth of the measured rate, else 200MB).",
)
@json_option
@store_options
def check(config: Config, *, volume: str, wait: bool, look: bool, cancel: bool, rate: int | None, as_json: bool) -> None:
    """Verify the checksums of every block of the running VOLUME (NODE/NAME) in the background.

    Bad blocks are removed, as by a load, and are misses afterwards. A restarted node has no record of earlier
    checks. For volumes that no node has open, use kvstore volume check, which also repairs.

    Examples:
      kvstore volumes check host-1/nvme0 --wait
      kvstore volumes check host-1/nvme0 --rate 50MB
      kvstore volumes check host-1/nvme0 --status --json | jq .bad_blocks

    Exit codes with --wait or --status: 1 the check failed or found bad or unreadable blocks, 4 it was cancelled.
    """
    if look + cancel + (wait or rate is not None) > 1:
        raise click.UsageError("--status, --cancel and --wait or --rate exclude each other")
    node_id, name = _parts(volume)

    async def found(store: Store) -> VolumeCheck:
        if look:
            return await store.checks.look(node_id, name)
        if cancel:
            return await store.checks.cancel(node_id, name)
        begun = await store.checks.begin(node_id, name, rate)
        return await _checked(store, node_id, name) if wait else begun

    done = ask(config, found)
    if as_json:
        output.as_json(done)
    else:
        output.line(_said(done))
    if cancel or not done.ended:
        return
    if done.state == "cancelled":
        sys.exit(EXIT_IN_PART)
    if done.state == "failed" or done.bad_blocks or done.unreadable_blocks:
        sys.exit(1)


async def _checked(store: Store, node_id: str, name: str) -> VolumeCheck:
    """Show the progress of a check until it ends."""
    from rich.console import Console

    from kvstore.replay.progress import progress

    with progress("checking", 1, Console(file=sys.stderr), unit="blocks") as report:
        while True:
            done = await store.checks.look(node_id, name)
            if done.state == "none":
                raise click.ClickException(f"{done.volume_id}: the node was restarted, which ended the check")
            report(done.checked_blocks, "", done.blocks)
            if done.ended:
                return done
            await asyncio.sleep(_POLL_S)


def _said(done: VolumeCheck) -> str:
    """State of a check in one line."""
    if done.state == "none":
        return f"{done.volume_id}: no check since the node started"
    told = [f"{done.volume_id}: {done.state}", f"{done.checked_blocks:,} of {done.blocks:,} blocks checked"]
    if done.bad_blocks:
        told.append(f"{done.bad_blocks:,} corrupt and removed")
    if done.rewritten_blocks:
        told.append(f"{done.rewritten_blocks:,} of them written again from DRAM")
    if done.unreadable_blocks:
        told.append(f"{done.unreadable_blocks:,} unreadable")
    if done.gone_blocks:
        told.append(f"{done.gone_blocks:,} evicted meanwhile")
    if done.checked_bytes:
        told.append(f"{output.size(done.checked_bytes)} read in {output.duration(done.took_s)}")
    return ", ".join([*told, *([done.why] if done.why else [])])


def _parts(volume: str) -> tuple[str, str]:
    """Parse NODE/NAME."""
    node_id, _, name = volume.partition("/")
    if not name:
        raise click.BadParameter("a volume is NODE/NAME, as listed by kvstore volumes", param_hint="VOLUME")
    return node_id, name


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


def _reckoned(bytes_per_s: float, source: str | None) -> str:
    return _SOURCES[source].format(output.rate(bytes_per_s))


def _planned(nic: Nic) -> str:
    """Bandwidth that the planner assumes for a link."""
    mark = "(assumed)" if nic.planned_source == "assumed" else ""
    return f"{output.rate(nic.planned_bytes_per_s or 0)}{mark}"


def _facts(node: NodeDetail) -> list[tuple[str, str]]:
    told = [
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
                f"{nic.address}, planned with "
                + (
                    "nothing"
                    if nic.planned_bytes_per_s is None
                    else _SOURCES[nic.planned_source].format(output.rate(nic.planned_bytes_per_s))
                )
                + f", {output.size(nic.pending_bytes)} waiting",
            )
            for nic in node.nics
        ),
        ("volumes", ", ".join(node.volumes)),
        ("mounts", ", ".join(node.mounts)),
    ]
    if node.process is None:
        return [*told, ("does not answer", node.unreached or "")]
    process = node.process
    cap = process.traffic_cap_bytes_per_s
    return [
        *told,
        ("version", process.version),
        ("up", output.duration(process.uptime_s)),
        ("sessions", str(process.sessions)),
        ("blocks", f"{process.blocks:,}"),
        ("to become durable", f"{process.write_behind_waiting_blocks:,} blocks"),
        ("to be published", f"{process.publish_waiting_events:,} changes"),
        *((one.name, f"{output.size(one.used_bytes)} used, {one.waiting_loads} loads wait") for one in process.staging),
        ("traffic cap", "cannot be given one" if cap is None else output.rate(cap) if cap else "none"),
        ("I/O", "; ".join(process.io_engines)),
    ]
