"""``kvstore status``: summary of a running store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import click

from kvstore.cli.commands.store.shard_lines import shard_lines
from kvstore.cli.support import output
from kvstore.cli.support.help import Command
from kvstore.cli.support.result import CommandOutput
from kvstore.cli.support.store_client import EXIT_REFUSED, StoreConnection, ask, store_query
from kvstore.config.model import Config
from kvstore.health.codes import METADATA_UNREACHABLE
from kvstore.health.quantities import show_size

if TYPE_CHECKING:
    from kvstore.control_api.schemas.shards import Shards

EXIT_DEGRADED: Final = 5
"""Exit code: the store answers, and at least one error or warning is present."""
_HEALTH_WORDS: Final = {"ok": "HEALTH_OK", "warning": "HEALTH_WARN", "error": "HEALTH_ERR"}


@click.command(cls=Command)
@click.option("--detail", is_flag=True, help="Print what each finding means and what to do, and the servers of a shared index.")
@store_query
def status(config: Config, *, detail: bool) -> CommandOutput:
    """Show health, nodes, volumes and usage as the metadata server knows them.

    The first line is HEALTH_OK, HEALTH_WARN or HEALTH_ERR with the number of findings; a line per finding follows, with its code
    and the facts.

    JSON: health (ok, warning, error), findings (code, severity, subject, facts, title, meaning, action, docs), metadata (the
    setting), metadata_servers, each with address, state (usable, on_trial, away) and used; index (servers that hold a shared
    index, and the metadata servers that serve it, as in GET /v1/index/shards); blocks (with those in published caches of
    engines) and index_bytes of the index, counters of the metadata server by name; namespaces, each with id, model,
    block_tokens, block_bytes; nodes, each with id, alive, state (active, draining, drained, drain_blocked), stopped, refused
    (null, or why its calls are refused), heartbeat_age_ms, roles, control_address, data_address, mounts, drain (null: it is not
    to drain) and volumes, each with id, tier, capacity_bytes, used_bytes, blocks, arriving (the metadata server awaits its
    inventory, or a part of it) and read_only (null, or the reason).

    Examples:
      kvstore status
      kvstore status --detail
      kvstore status --metadata 10.0.0.1:7400 -o json
      kvstore status --watch 5

    Exit codes: 0 HEALTH_OK, 1 failed or no answer, 2 usage error, 3 rejected, 5 HEALTH_WARN or HEALTH_ERR: at least one finding.
    """
    try:
        summary, shards = ask(config, lambda store: fetch_status(config, store))
    except click.ClickException as error:
        if error.exit_code != EXIT_REFUSED and click.get_current_context().params["output_format"] == "table":
            output.line(f"{_HEALTH_WORDS['error']}  {METADATA_UNREACHABLE.name}")
        raise

    def show() -> None:
        _print_health(summary, detail=detail)
        _print(summary)
        if detail:
            for line in shard_lines(shards):
                output.line(line)

    return CommandOutput(summary, show, 0 if summary["health"] == "ok" else EXIT_DEGRADED)


async def fetch_status(config: Config, store: StoreConnection) -> tuple[dict[str, Any], Shards]:
    """Query the metadata server. Returns the document, and its part about the servers of the index.

    Raises:
        KVStoreError: it does not answer.
    """
    from kvproto.v1.common_pb2 import NodeState
    from kvstore.control_api import serializers
    from kvstore.core.types import Tier
    from kvstore.health.findings import from_proto

    server, nodes, counters = await asyncio.gather(store.rpc.server(), store.rpc.nodes(), store.rpc.counters())
    servers, shards = await asyncio.gather(store.rpc.metadata_servers(), store.queries.shards())
    namespaces = [one async for one in store.queries.namespaces()]
    document = {
        **serializers.health(from_proto(server.findings)).model_dump(),
        "metadata": config.client.metadata,
        "metadata_servers": [{"address": one.address, "state": one.condition, "used": one.used} for one in servers],
        "index": shards.model_dump(mode="json"),
        "blocks": server.blocks,
        "index_bytes": server.index_bytes,
        "counters": dict(sorted(counters.items())),
        "namespaces": [
            {
                "id": known.namespace_id,
                "model": known.spec.model,
                "block_tokens": known.spec.block_tokens,
                "block_bytes": known.spec.layers * known.spec.layer_block_bytes,
            }
            for known in namespaces
        ],
        "nodes": [
            {
                "id": known.node.node_id,
                "alive": known.alive,
                "state": NodeState.Name(known.state).removeprefix("NODE_STATE_").lower(),
                "stopped": known.stopped,
                "refused": known.refused or None,
                "drain": _drain(known),
                "heartbeat_age_ms": known.heartbeat_age_ms,
                "roles": list(known.node.roles),
                "control_address": known.node.control_address,
                "data_address": known.node.data_address,
                "volumes": [
                    {
                        "id": volume.volume_id,
                        "tier": Tier(volume.tier).name.lower(),
                        "capacity_bytes": volume.capacity_bytes,
                        **_usage(known.usages, volume.volume_id),
                        "arriving": serializers.is_arriving(known, volume.volume_id),
                    }
                    for volume in known.node.volumes
                ],
                "mounts": list(known.node.mounts),
            }
            for known in nodes.values()
        ],
    }
    return document, shards


def _drain(known: Any) -> dict[str, Any] | None:  # noqa: ANN401  # a NodeStatus
    """Progress of a drain; None if the node does not drain."""
    if not known.HasField("order"):
        return None
    numbers = ("waiting_blocks", "not_durable_blocks", "left_blocks", "moved_blocks", "moved_bytes")
    return {"move": known.order.move, **{name: getattr(known.drain, name) for name in numbers}, "why": known.drain.why or None}


def _usage(usages: Any, volume_id: str) -> dict[str, Any]:  # noqa: ANN401  # a repeated field
    for usage in usages:
        if usage.volume_id == volume_id:
            return {"used_bytes": usage.used_bytes, "blocks": usage.blocks, "read_only": usage.read_only or None}
    return {"used_bytes": 0, "blocks": 0, "read_only": None}


def _print_health(summary: dict[str, Any], *, detail: bool) -> None:
    """Print the health line and a line per finding."""
    counts = [
        f"{number} {severity}{'s' if number != 1 and severity != 'info' else ''}"
        for severity in ("error", "warning", "info")
        if (number := sum(one["severity"] == severity for one in summary["findings"]))
    ]
    output.line("  ".join([_HEALTH_WORDS[summary["health"]], ", ".join(counts)]).rstrip())
    for one in summary["findings"]:
        output.line(f"  {one['code']}: {one['facts']}")
        if detail:
            output.line(f"    meaning: {one['meaning']}")
            output.line(f"    action:  {one['action']}")
    if summary["findings"] and not detail:
        output.line("  `kvstore status --detail` prints what to do.")


def _print(summary: dict[str, Any]) -> None:
    """Print lines instead of a table, so that addresses can be copied from narrow terminals."""
    so_far = " so far" if any(one["arriving"] for node in summary["nodes"] for one in node["volumes"]) else ""
    index = show_size(summary["index_bytes"])
    output.line(f"metadata server {summary['metadata']}: {summary['blocks']:,} blocks{so_far}, index {index}")
    if len(summary["metadata_servers"]) > 1:
        for one in summary["metadata_servers"]:
            output.line(f"  {one['address']}: {one['state'].replace('_', ' ')}{', in use' if one['used'] else ''}")
    for namespace in summary["namespaces"]:
        size = show_size(namespace["block_bytes"])
        output.line(f"namespace {namespace['id']}")
        output.line(f"  {namespace['model']}: {namespace['block_tokens']} tokens and {size} per block")
    for node in summary["nodes"]:
        state = "alive" if node["alive"] else f"silent for {node['heartbeat_age_ms'] / 1000:.1f} s"
        if node["stopped"]:
            state = "stopped"
        if node["refused"]:
            state = "refused"
        if node["drain"] is not None:
            state += f", {node['state'].replace('_', ' ')}"
        if node["control_address"]:
            state += f", at {node['control_address']}, {', '.join(node['roles'])}"
        else:
            state += ", the cache of an engine"
        output.line(f"node {node['id']}: {state}")
        width = max((len(volume["id"]) for volume in node["volumes"]), default=0)
        for volume in node["volumes"]:
            fill = f"{show_size(volume['used_bytes']):>10} of {show_size(volume['capacity_bytes']):>10}"
            output.line(f"  {volume['id']:<{width}}  {volume['tier']:<4}  {fill}  {volume['blocks']:>11,} blocks")
            if volume["arriving"]:
                output.line("    inventory arriving: these figures are not complete yet")
            if volume["read_only"]:
                output.line(f"    accepts no blocks, serves its present ones: {volume['read_only']}")
        if node["drain"] is not None and node["drain"]["why"]:
            output.line(f"  waits for: {node['drain']['why']}; {node['drain']['not_durable_blocks']:,} blocks would be lost now")
        for mount in node["mounts"]:
            output.line(f"  reads {mount} directly")
    if not summary["nodes"]:
        output.line("no nodes yet; kvstore node starts one")
