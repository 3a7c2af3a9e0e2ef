"""``kvstore status``: a running store at a glance."""

from __future__ import annotations

import json
from typing import Any

import click

from kvstore.cli.help import Command
from kvstore.cli.options import setting_option, with_quiet_config
from kvstore.cli.settings import tls
from kvstore.core.config import Config
from kvstore.core.errors import DeadlineExceeded, Unavailable


@click.command(cls=Command)
@setting_option("--metadata", key="client.metadata", metavar="HOST:PORT", help="Address of the metadata server.")
@click.option("--json", "as_json", is_flag=True, help="Prints JSON.")
@with_quiet_config
def status(config: Config, *, as_json: bool) -> None:
    """Shows nodes, volumes and fill, as the metadata server knows them.

    Examples:
      kvstore status
      kvstore status --metadata 10.0.0.1:7400 --json

    Exits with 1 where no metadata server answers.
    """
    try:
        found = fetch_status(config)
    except (Unavailable, DeadlineExceeded) as error:
        raise click.ClickException(
            f"no metadata server answers at {config.client.metadata} ({error.kind}): kvstore up starts a store on this machine, "
            "--metadata HOST:PORT names another"
        ) from error
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _print(found)


def fetch_status(config: Config) -> dict[str, Any]:
    """Asks the metadata server; plain data.

    Raises:
        KVStoreError: it does not answer.
    """
    from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
    from kvproto.v1.common_pb2 import NodeState
    from kvstore.core.types import Tier
    from kvstore.rpc.client import call, connect

    timeout_s = config.client.deadline / 1000
    with connect(config.client.metadata, tls=tls(config.client.tls)) as channel:
        stub = metadata_pb2_grpc.MetadataStub(channel)
        nodes = call(stub.ListNodes, metadata_pb2.ListNodesRequest(), timeout_s)
        stats = call(stub.GetStats, metadata_pb2.GetStatsRequest(), timeout_s)
        namespaces = call(stub.ListNamespaces, metadata_pb2.ListNamespacesRequest(), timeout_s)
    return {
        "metadata": config.client.metadata,
        "blocks": stats.blocks,
        "index_bytes": stats.index_bytes,
        "counters": dict(sorted(stats.counters.items())),
        "namespaces": [
            {
                "id": known.namespace_id.hex(),
                "model": known.spec.model,
                "block_tokens": known.spec.block_tokens,
                "block_bytes": known.spec.layers * known.spec.layer_block_bytes,
            }
            for known in namespaces.namespaces
        ],
        "nodes": [
            {
                "id": known.node.node_id,
                "alive": known.alive,
                "state": NodeState.Name(known.state).removeprefix("NODE_STATE_").lower(),
                "stopped": known.stopped,
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
            for known in nodes.nodes
        ],
    }


def _drain(known: Any) -> dict[str, Any] | None:  # noqa: ANN401  # a NodeStatus
    """How far a node is that is to drain; None: it is not."""
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
    """Lines that wrap rather than a table that cuts: addresses are there to be copied, on narrow terminals too."""
    from kvstore.replay.report import show_bytes

    click.echo(f"metadata server {found['metadata']}: {found['blocks']:,} blocks, index {show_bytes(found['index_bytes'])}")
    for namespace in found["namespaces"]:
        size = show_bytes(namespace["block_bytes"])
        click.echo(f"namespace {namespace['id']}\n  {namespace['model']}: {namespace['block_tokens']} tokens and {size} a block")
    for node in found["nodes"]:
        state = "alive" if node["alive"] else f"silent for {node['heartbeat_age_ms'] / 1000:.1f} s"
        if node["stopped"]:
            state = "stopped"
        if node["drain"] is not None:
            state += f", {node['state'].replace('_', ' ')}"
        click.echo(f"node {node['id']}: {state}, at {node['control_address']}, {', '.join(node['roles'])}")
        width = max((len(volume["id"]) for volume in node["volumes"]), default=0)
        for volume in node["volumes"]:
            fill = f"{show_bytes(volume['used_bytes']):>10} of {show_bytes(volume['capacity_bytes']):>10}"
            click.echo(f"  {volume['id']:<{width}}  {volume['tier']:<4}  {fill}  {volume['blocks']:>11,} blocks")
            if volume["read_only"]:
                click.echo(f"    takes no blocks, serves what it holds: {volume['read_only']}")
        if node["drain"] is not None and node["drain"]["why"]:
            click.echo(f"  waits for: {node['drain']['why']}; {node['drain']['not_durable_blocks']:,} blocks would be lost now")
        for mount in node["mounts"]:
            click.echo(f"  reads {mount} directly")
    if not found["nodes"]:
        click.echo("no nodes yet; kvstore node starts one")
