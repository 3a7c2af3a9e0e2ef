"""``kvstore namespaces``: list, inspect, evict and invalidate namespaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from kvstore.cli.commands.store.namespace_names import find, find_ruled
from kvstore.cli.support import output, param_types, result
from kvstore.cli.support.help import Resource
from kvstore.cli.support.result import CommandOutput
from kvstore.cli.support.store_client import (
    StoreConnection,
    ask,
    complete_namespaces,
    confirm,
    exit_code_of,
    store_change,
    store_query,
    tell_unreached,
    yes_option,
)
from kvstore.config.model import Config
from kvstore.core.limits import MAX_COPIES

if TYPE_CHECKING:
    from kvstore.control_api.schemas.retention import Rule
    from kvstore.control_api.schemas.store import Namespace, NamespaceEvicted, Usage

_argument = click.argument("namespace", shell_complete=complete_namespaces)


@click.group(cls=Resource)
def namespaces() -> None:
    """List, inspect, evict, keep, copy and invalidate namespaces. Without a command, list them.

    NAMESPACE is an id, the first 4 or more digits of an id, or the name of a model that has one namespace.

    Examples:
      kvstore namespaces
      kvstore namespaces usage 8c2f0d
      kvstore namespaces evict my-model --tier nvme
    """


@namespaces.command("list")
@store_query
def list_namespaces(config: Config) -> CommandOutput:
    """List the namespaces in order of registration, with their lookup counts.

    Long names are cut in the table. `show`, JSON and YAML have all of them.

    Examples:
      kvstore namespaces list
      kvstore namespaces list -o json | jq -r '.items[] | select(.spec.model == "my-model") | .namespace_id'
    """

    async def found(store: StoreConnection) -> list[Namespace]:
        return [one async for one in store.queries.namespaces()]

    known = ask(config, found)
    return result.table(
        known,
        (
            "namespace",
            "model",
            "weights",
            "block tokens",
            "block",
            "shard",
            "tenant",
            "lookups",
            "hit",
            "ttl",
            "kept",
            "copies",
        ),
        [
            (
                one.namespace_id,
                output.short(one.spec.model),
                output.short(one.spec.weights_epoch),
                str(one.spec.block_tokens),
                output.size(one.spec.layers * one.spec.layer_block_bytes),
                f"{one.spec.shard_rank}/{one.spec.shard_count}",
                output.short(one.spec.tenant),
                str(one.lookups),
                output.share(one.hit_blocks, one.asked_blocks),
                "" if one.ttl_s is None else output.duration(one.ttl_s),
                "yes" if one.kept else "",
                str(one.copies),
            )
            for one in known
        ],
    )


@namespaces.command("show")
@_argument
@store_query
def show_namespace(config: Config, *, namespace: str) -> CommandOutput:
    """Show a namespace: spec and lookup counts.

    Examples:
      kvstore namespaces show 8c2f0d
    """
    known = ask(config, lambda store: find(store, namespace))
    spec = known.spec.model_dump(mode="json")
    return result.facts(
        known,
        [
            ("namespace", known.namespace_id),
            *((name.replace("_", " "), str(value)) for name, value in spec.items()),
            ("lookups", f"{known.lookups:,}"),
            ("asked", f"{known.asked_blocks:,} blocks"),
            ("hit", f"{known.hit_blocks:,} blocks {output.share(known.hit_blocks, known.asked_blocks)}".rstrip()),
            ("ttl", "none" if known.ttl_s is None else output.duration(known.ttl_s)),
            ("kept", "yes" if known.kept else "no"),
            ("copies", str(known.copies)),
        ],
    )


@namespaces.command()
@_argument
@store_query
def usage(config: Config, *, namespace: str) -> CommandOutput:
    """Show the usage of a namespace by volume. Every node counts its blocks.

    Examples:
      kvstore namespaces usage 8c2f0d
      kvstore namespaces usage 8c2f0d -o json | jq '[.tiers[].bytes] | add'
    """

    async def question(store: StoreConnection) -> Usage:
        return await store.queries.usage(bytes.fromhex((await find(store, namespace)).namespace_id))

    found = ask(config, question)
    tell_unreached(found.unreached)
    return result.table(
        found,
        ("volume", "node", "tier", "blocks", "bytes"),
        [(one.volume_id, one.node_id, one.tier, str(one.blocks), output.size(one.bytes)) for one in found.volumes],
    )


@namespaces.command()
@_argument
@click.option("--tier", "tiers", type=click.Choice(("dram", "nvme")), multiple=True, help="Evict from this tier only.")
@yes_option
@store_change
def evict(config: Config, *, namespace: str, tiers: tuple[str, ...], yes: bool) -> CommandOutput:
    """Evict the blocks of a namespace on every node. Blocks in use and dirty DRAM blocks stay.

    The counts are replicas: a block in DRAM and on a volume counts twice. A kept namespace is not evicted.

    Examples:
      kvstore namespaces evict 8c2f0d
      kvstore namespaces evict 8c2f0d --tier nvme --yes
    """
    known = ask(config, lambda store: find(store, namespace))
    where = " and ".join(dict.fromkeys(tiers)) or "dram and nvme"
    confirm(f"Evict all blocks of {_named(known)} from {where}, at every node", yes=yes)
    wanted = bytes.fromhex(known.namespace_id)
    return _changed(ask(config, lambda store: store.commands.evict_namespace(wanted, tiers or ("dram", "nvme"))), "evicted")


@namespaces.command()
@_argument
@yes_option
@store_change
def invalidate(config: Config, *, namespace: str, yes: bool) -> CommandOutput:
    """Drop every block of a namespace on every node, durable or not. For blocks with wrong content.

    Stop the engines that store them first. Nodes that do not answer keep and serve their blocks.

    Examples:
      kvstore namespaces invalidate 8c2f0d
      kvstore namespaces invalidate 8c2f0d --yes || echo "again, once all nodes are back"
    """
    known = ask(config, lambda store: find(store, namespace))
    confirm(f"Drop every block of {_named(known)}, durable or not, at every node", yes=yes)
    wanted = bytes.fromhex(known.namespace_id)
    return _changed(ask(config, lambda store: store.commands.invalidate_namespace(wanted)), "dropped")


def _time(ctx: click.Context, param: click.Parameter, value: str) -> float | None:
    """Seconds of ``90s``, ``10m``, ``12h``, ``7d``; None: ``none``."""
    return None if value == "none" else param_types.some_seconds(ctx, param, value)


@namespaces.command()
@_argument
@click.argument("time", metavar="TIME|none", callback=_time)
@store_change
def ttl(config: Config, *, namespace: str, time: float | None) -> CommandOutput:
    """Set the time to live of a namespace: every node evicts blocks that were not stored or loaded for this time.

    It counts from the last use known to the node, at the earliest from the start of the node or from now.

    Examples:
      kvstore namespaces ttl 8c2f0d 7d
      kvstore namespaces ttl 8c2f0d none
    """
    return _rule(config, namespace, {"ttl_s": time})


@namespaces.command()
@_argument
@store_change
def keep(config: Config, *, namespace: str) -> CommandOutput:
    """Keep a namespace: protect its blocks from eviction, up to half of each tier of a node. Invalidate still drops them.

    Examples:
      kvstore namespaces keep 8c2f0d
    """
    return _rule(config, namespace, {"kept": True})


@namespaces.command()
@_argument
@store_change
def unkeep(config: Config, *, namespace: str) -> CommandOutput:
    """Let the blocks of a namespace be evicted again.

    Examples:
      kvstore namespaces unkeep 8c2f0d
    """
    return _rule(config, namespace, {"kept": False})


@namespaces.command()
@_argument
@click.argument("copies", type=click.IntRange(1, MAX_COPIES))
@store_change
def copies(config: Config, *, namespace: str, copies: int) -> CommandOutput:
    """Set on how many nodes each durable block of a namespace is stored: 1 or 2.

    With 2, another node copies the blocks in the background, in another node.zone if there is one. With 1 again, second copies
    stay until they are evicted.

    Examples:
      kvstore namespaces copies 8c2f0d 2
    """
    return _rule(config, namespace, {"copies": copies})


def _rule(config: Config, namespace: str, update: Mapping[str, object]) -> CommandOutput:
    """Change the retention rule of a namespace unless it was changed concurrently."""

    async def change(store: StoreConnection) -> Rule:
        found = await find_ruled(store, namespace)
        before = await store.queries.rule(found)
        done, _ = await store.commands.set_rule(before.model_copy(update=update), before)
        return done

    done = ask(config, change)
    lives = "no time to live" if done.ttl_s is None else f"time to live {output.duration(done.ttl_s)}"
    held = f"{done.copies} cop{'y' if done.copies == 1 else 'ies'} of each durable block"
    return result.line(done, f"{done.namespace_id}: {lives}, {'kept' if done.kept else 'not kept'}, {held}")


@namespaces.command()
@store_query
def rules(config: Config) -> CommandOutput:
    """List retention rules, also of namespaces that are not registered any more.

    Examples:
      kvstore namespaces rules
      kvstore namespaces rules -o json | jq -r '.items[] | select(.kept) | .namespace_id'
    """
    known = ask(config, lambda store: store.queries.rules())
    return result.table(
        known,
        ("namespace", "ttl", "kept", "copies"),
        [
            (
                one.namespace_id,
                "" if one.ttl_s is None else output.duration(one.ttl_s),
                "yes" if one.kept else "",
                str(one.copies),
            )
            for one in known
        ],
    )


@namespaces.command("bump-weights")
@_argument
@click.argument("weights_epoch")
@click.option("--keep", is_flag=True, help="Keep the blocks of the old weights.")
@yes_option
@store_change
def bump_weights(config: Config, *, namespace: str, weights_epoch: str, keep: bool, yes: bool) -> CommandOutput:
    """Register the namespace with the same spec and weights WEIGHTS_EPOCH, and drop the blocks of the old weights.

    Engines use it once they are started with the new epoch.

    Examples:
      kvstore namespaces bump-weights 8c2f0d 2026-06-01
      kvstore namespaces bump-weights 8c2f0d 2026-06-01 --keep
    """
    known = ask(config, lambda store: find(store, namespace))
    if not keep:
        confirm(f"Drop every block of {_named(known)}, at every node, and register weights {weights_epoch}", yes=yes)
    wanted = bytes.fromhex(known.namespace_id)
    done = ask(config, lambda store: store.commands.bump_weights(wanted, weights_epoch, invalidate=not keep))
    registered = f"{done.namespace_id}: {done.spec.model} with weights {done.spec.weights_epoch}"
    if done.invalidated is None:
        return result.line(done, registered)
    dropped = done.invalidated
    tell_unreached(dropped.unreached)

    def show() -> None:
        output.line(registered)
        output.line(_summary(dropped, "dropped"))

    return CommandOutput(done, show, exit_code_of(dropped))


def _named(namespace: Namespace) -> str:
    return f"{namespace.namespace_id} ({namespace.spec.model}, weights {namespace.spec.weights_epoch or output.NOTHING})"


def _changed(done: NamespaceEvicted, verb: str) -> CommandOutput:
    tell_unreached(done.unreached)
    return CommandOutput(done, lambda: output.line(_summary(done, verb)), exit_code_of(done))


def _summary(done: NamespaceEvicted, verb: str) -> str:
    kept = f", {done.kept_blocks:,} stay" if done.kept_blocks else ""
    nodes = ", ".join(f"{one.node_id} {one.evicted_blocks:,}" for one in done.nodes)
    return f"{done.namespace_id}: {done.evicted_blocks:,} copies of blocks {verb}{kept}" + (f" ({nodes})" if nodes else "")
