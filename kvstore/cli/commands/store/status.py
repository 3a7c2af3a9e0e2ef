"""``kvstore status``: summary of a running store."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from kvstore.cli.support import output
from kvstore.cli.support.help import Command
from kvstore.cli.support.store_client import Store, ask, store_options
from kvstore.config.model import Config


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@store_options
def status(config: Config, *, as_json: bool) -> None:
    """Show nodes, volumes and usage as the metadata server knows them.

    JSON: metadata (its address), problems (as text), blocks and index_bytes of the index, counters of the
    metadata server by name; namespaces, each with id, model, block_tokens, block_bytes; nodes, each with id, alive, state
    (active, draining, drained, drain_blocked), stopped, refused (null, or why its calls are refused), heartbeat_age_ms, roles,
    control_address, data_address, mounts, drain (null: it is not to drain) and volumes, each with id, tier, capacity_bytes,
    used_bytes, blocks and read_only (null, or the reason).

    Examples:
      kvstore status
      kvstore status --metadata 10.0.0.1:7400 --json
    """
    found = ask(config, lambda store: fetch_status(config, store))
    if as_json:
        output.as_json(found)
    else:
        _print(found)


async def fetch_status(config: Config, store: Store) -> dict[str, Any]:
    """Query the metadata server.

    Raises:
        KVStoreError: it does not answer.
    """
    from kvproto.v1.common_pb2 import NodeState
    from kvstore.control_api import serializers
    from kvstore.control_api.queries import MOST_PROBLEMS
    from kvstore.core.types import Tier

    server, nodes, counters = await asyncio.gather(store.rpc.server(), store.rpc.nodes(), store.rpc.counters())
    namespaces = [one async for one in store.queries.namespaces()]
    return {
        "metadata": config.client.metadata,
        "problems": serializers.problems(server.problems, list(nodes.values()), MOST_PROBLEMS),
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
                    }
                    for volume in known.node.volumes
                ],
                "mounts": list(known.node.mounts),
            }
            for known in nodes.values()
        ],
    }


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


def _print(found: dict[str, Any]) -> None:
    """Print lines instead of a table, so that addresses can be copied from narrow terminals."""
    from kvstore.replay.report import show_bytes

    output.line(f"metadata server {found['metadata']}: {found['blocks']:,} blocks, index {show_bytes(found['index_bytes'])}")
    for problem in found["problems"]:
        output.line(f"problem: {problem}")
    for namespace in found["namespaces"]:
        size = show_bytes(namespace["block_bytes"])
        output.line(f"namespace {namespace['id']}")
        output.line(f"  {namespace['model']}: {namespace['block_tokens']} tokens and {size} a block")
    for node in found["nodes"]:
        state = "alive" if node["alive"] else f"silent for {node['heartbeat_age_ms'] / 1000:.1f} s"
        if node["stopped"]:
            state = "stopped"
        if node["refused"]:
            state = "refused"
        if node["drain"] is not None:
            state += f", {node['state'].replace('_', ' ')}"
        output.line(f"node {node['id']}: {state}, at {node['control_address']}, {', '.join(node['roles'])}")
        width = max((len(volume["id"]) for volume in node["volumes"]), default=0)
        for volume in node["volumes"]:
            fill = f"{show_bytes(volume['used_bytes']):>10} of {show_bytes(volume['capacity_bytes']):>10}"
            output.line(f"  {volume['id']:<{width}}  {volume['tier']:<4}  {fill}  {volume['blocks']:>11,} blocks")
            if volume["read_only"]:
                output.line(f"    takes no blocks, serves what it holds: {volume['read_only']}")
        if node["drain"] is not None and node["drain"]["why"]:
            output.line(f"  waits for: {node['drain']['why']}; {node['drain']['not_durable_blocks']:,} blocks would be lost now")
        for mount in node["mounts"]:
            output.line(f"  reads {mount} directly")
    if not found["nodes"]:
        output.line("no nodes yet; kvstore node starts one")
