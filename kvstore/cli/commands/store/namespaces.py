"""``kvstore namespaces``: list, inspect, evict and invalidate namespaces."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import click

from kvstore.cli.support import output, param_types
from kvstore.cli.support.help import Command, Group
from kvstore.cli.support.store_client import (
    Refusal,
    Store,
    ask,
    complete_namespaces,
    confirm,
    end_of,
    json_option,
    lists,
    store_options,
    tell_unreached,
    yes_option,
)
from kvstore.config.model import Config

if TYPE_CHECKING:
    from kvstore.control_api.schemas.retention import Rule
    from kvstore.control_api.schemas.store import Namespace, NamespaceEvicted, Usage

Found = TypeVar("Found")
LEAST_DIGITS: Final = 4
_ID_DIGITS: Final = 32
_argument = click.argument("namespace", shell_complete=complete_namespaces)


async def find(store: Store, text: str) -> Namespace:
    """The namespace with an id or id prefix.

    Raises:
        click.BadParameter: not an id prefix.
        Refusal: no namespace or several namespaces match.
    """
    wanted = _digits(text)
    return _only([one async for one in store.queries.namespaces() if one.namespace_id.startswith(wanted)], wanted)


async def _find_ruled(store: Store, text: str) -> bytes:
    """Like ``find``, but return the id, and also find namespaces that have a rule and are not registered.

    Raises:
        click.BadParameter: not an id prefix.
        Refusal: no namespace or several namespaces match.
    """
    wanted = _digits(text)
    known = {one.namespace_id async for one in store.queries.namespaces()}
    if not any(one.startswith(wanted) for one in known):
        known |= {one.namespace_id for one in await store.queries.rules()}
    return bytes.fromhex(_only([one for one in known if one.startswith(wanted)], wanted))


def _digits(text: str) -> str:
    """Parse an id prefix.

    Raises:
        click.BadParameter: not an id prefix.
    """
    wanted = text.lower()
    if not re.fullmatch(f"[0-9a-f]{{{LEAST_DIGITS},{_ID_DIGITS}}}", wanted):
        raise click.BadParameter(
            f"a namespace is an id, or its first {LEAST_DIGITS} or more digits; got {output.clean(text[:64])}",
            param_hint="NAMESPACE",
        )
    return wanted


def _only(found: Sequence[Found], wanted: str) -> Found:
    if len(found) != 1:
        many = f"{len(found)} namespaces begin" if found else "no namespace begins"
        raise Refusal(f"{many} with {wanted}; kvstore namespaces lists them")
    return found[0]


@click.group(cls=Group, invoke_without_command=True)
@json_option
@store_options
def namespaces(config: Config, *, as_json: bool) -> None:
    """List the namespaces in order of registration, with their lookup counts.

    Commands accept a prefix of a namespace id. Long names are cut in the table; `show` and --json have all
    of them.

    Examples:
      kvstore namespaces
      kvstore namespaces --json | jq -r '.items[] | select(.spec.model == "my-model") | .namespace_id'
      kvstore namespaces usage 8c2f0d
      kvstore namespaces evict 8c2f0d --tier nvme
    """
    if not lists(click.get_current_context(), as_json):
        return

    async def found(store: Store) -> list[Namespace]:
        return [one async for one in store.queries.namespaces()]

    known = ask(config, found)
    if as_json:
        output.as_json({"items": [one.model_dump(mode="json") for one in known]})
        return
    output.table(
        ("namespace", "model", "weights", "block tokens", "block", "shard", "tenant", "lookups", "hit", "ttl", "pinned"),
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
                "yes" if one.pinned else "",
            )
            for one in known
        ],
    )


@namespaces.command("show", cls=Command)
@_argument
@json_option
@store_options
def show_namespace(config: Config, *, namespace: str, as_json: bool) -> None:
    """Show a namespace: spec and lookup counts.

    Examples:
      kvstore namespaces show 8c2f0d
    """
    found = ask(config, lambda store: find(store, namespace))
    if as_json:
        output.as_json(found)
        return
    spec = found.spec.model_dump(mode="json")
    output.facts(
        [
            ("namespace", found.namespace_id),
            *((name.replace("_", " "), str(value)) for name, value in spec.items()),
            ("lookups", f"{found.lookups:,}"),
            ("asked", f"{found.asked_blocks:,} blocks"),
            ("hit", f"{found.hit_blocks:,} blocks {output.share(found.hit_blocks, found.asked_blocks)}".rstrip()),
            ("ttl", "none" if found.ttl_s is None else output.duration(found.ttl_s)),
            ("pinned", "yes" if found.pinned else "no"),
        ]
    )


@namespaces.command(cls=Command)
@_argument
@json_option
@store_options
def usage(config: Config, *, namespace: str, as_json: bool) -> None:
    """Show the usage of a namespace by volume. Every node counts its blocks.

    Examples:
      kvstore namespaces usage 8c2f0d
      kvstore namespaces usage 8c2f0d --json | jq '[.tiers[].bytes] | add'
    """

    async def question(store: Store) -> Usage:
        return await store.queries.usage(bytes.fromhex((await find(store, namespace)).namespace_id))

    found = ask(config, question)
    if as_json:
        output.as_json(found)
        return
    output.table(
        ("volume", "node", "tier", "blocks", "bytes"),
        [(one.volume_id, one.node_id, one.tier, str(one.blocks), output.size(one.bytes)) for one in found.volumes],
    )
    tell_unreached(found.unreached)


@namespaces.command(cls=Command)
@_argument
@click.option("--tier", "tiers", type=click.Choice(("dram", "nvme")), multiple=True, help="Evict from this tier only.")
@yes_option
@json_option
@store_options
def evict(config: Config, *, namespace: str, tiers: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Evict the blocks of a namespace on every node. Blocks in use and dirty DRAM blocks stay.

    The counts are replicas: a block in DRAM and on a volume counts twice. A pinned namespace is not evicted.

    Examples:
      kvstore namespaces evict 8c2f0d
      kvstore namespaces evict 8c2f0d --tier nvme --yes
    """
    known = ask(config, lambda store: find(store, namespace))
    where = " and ".join(dict.fromkeys(tiers)) or "dram and nvme"
    confirm(f"Evict all blocks of {_named(known)} from {where}, at every node", yes=yes)
    wanted = bytes.fromhex(known.namespace_id)
    _say(ask(config, lambda store: store.commands.evict_namespace(wanted, tiers or ("dram", "nvme"))), "evicted", as_json=as_json)


@namespaces.command(cls=Command)
@_argument
@yes_option
@json_option
@store_options
def invalidate(config: Config, *, namespace: str, yes: bool, as_json: bool) -> None:
    """Drop every block of a namespace on every node, durable or not. For blocks with wrong content.

    Stop the engines that store them first. Nodes that do not answer keep and serve their blocks.

    Examples:
      kvstore namespaces invalidate 8c2f0d
      kvstore namespaces invalidate 8c2f0d --yes || echo "again, once all nodes are back"
    """
    known = ask(config, lambda store: find(store, namespace))
    confirm(f"Drop every block of {_named(known)}, durable or not, at every node", yes=yes)
    wanted = bytes.fromhex(known.namespace_id)
    _say(ask(config, lambda store: store.commands.invalidate_namespace(wanted)), "dropped", as_json=as_json)


def _time(ctx: click.Context, param: click.Parameter, value: str) -> float | None:
    """Seconds of ``90s``, ``10m``, ``12h``, ``7d``; None: ``none``."""
    days = re.fullmatch(r"(\d+)d", value)
    if days:
        return float(days[1]) * 86_400
    return None if value == "none" else param_types.some_seconds(ctx, param, value)


@namespaces.command(cls=Command)
@_argument
@click.argument("time", metavar="TIME|none", callback=_time)
@json_option
@store_options
def ttl(config: Config, *, namespace: str, time: float | None, as_json: bool) -> None:
    """Set the time to live of a namespace: every node evicts blocks that were not stored or loaded for this time.

    It counts from the last use known to the node, at the earliest from the start of the node or from now.

    Examples:
      kvstore namespaces ttl 8c2f0d 7d
      kvstore namespaces ttl 8c2f0d none
    """
    _rule(config, namespace, lambda before: (time, before.pinned), as_json=as_json)


@namespaces.command(cls=Command)
@_argument
@json_option
@store_options
def pin(config: Config, *, namespace: str, as_json: bool) -> None:
    """Pin a namespace: protect its blocks from eviction, up to half of each tier of a node. Invalidate still drops them.

    Examples:
      kvstore namespaces pin 8c2f0d
    """
    _rule(config, namespace, lambda before: (before.ttl_s, True), as_json=as_json)


@namespaces.command(cls=Command)
@_argument
@json_option
@store_options
def unpin(config: Config, *, namespace: str, as_json: bool) -> None:
    """Unpin a namespace.

    Examples:
      kvstore namespaces unpin 8c2f0d
    """
    _rule(config, namespace, lambda before: (before.ttl_s, False), as_json=as_json)


def _rule(config: Config, namespace: str, wanted: Callable[[Rule], tuple[float | None, bool]], *, as_json: bool) -> None:
    """Change the retention rule of a namespace unless it was changed concurrently."""

    async def change(store: Store) -> Rule:
        found = await _find_ruled(store, namespace)
        before = await store.queries.rule(found)
        ttl_s, pinned = wanted(before)
        done, _ = await store.commands.set_rule(found, ttl_s, pinned=pinned, expected=before)
        return done

    done = ask(config, change)
    if as_json:
        output.as_json(done)
    else:
        lives = "no time to live" if done.ttl_s is None else f"time to live {output.duration(done.ttl_s)}"
        output.line(f"{done.namespace_id}: {lives}, {'pinned' if done.pinned else 'not pinned'}")


@namespaces.command(cls=Command)
@json_option
@store_options
def rules(config: Config, *, as_json: bool) -> None:
    """List retention rules, also of namespaces that are not registered any more.

    Examples:
      kvstore namespaces rules
      kvstore namespaces rules --json | jq -r '.items[] | select(.pinned) | .namespace_id'
    """
    found = ask(config, lambda store: store.queries.rules())
    if as_json:
        output.as_json({"items": [one.model_dump(mode="json") for one in found]})
        return
    output.table(
        ("namespace", "ttl", "pinned"),
        [
            (one.namespace_id, "" if one.ttl_s is None else output.duration(one.ttl_s), "yes" if one.pinned else "")
            for one in found
        ],
    )


@namespaces.command("bump-weights", cls=Command)
@_argument
@click.argument("weights_epoch")
@click.option("--keep", is_flag=True, help="Keep the blocks of the old weights.")
@yes_option
@json_option
@store_options
def bump_weights(config: Config, *, namespace: str, weights_epoch: str, keep: bool, yes: bool, as_json: bool) -> None:
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
    if as_json:
        output.as_json(done)
    else:
        output.line(f"{done.namespace_id}: {done.spec.model} with weights {done.spec.weights_epoch}")
    if done.invalidated is not None:
        if not as_json:
            _tell(done.invalidated, "dropped")
        end_of(done.invalidated)


def _named(namespace: Namespace) -> str:
    return f"{namespace.namespace_id} ({namespace.spec.model}, weights {namespace.spec.weights_epoch or output.NOTHING})"


def _say(done: NamespaceEvicted, verb: str, *, as_json: bool) -> None:
    if as_json:
        output.as_json(done)
    else:
        _tell(done, verb)
    end_of(done)


def _tell(done: NamespaceEvicted, verb: str) -> None:
    kept = f", {done.kept_blocks:,} stay" if done.kept_blocks else ""
    nodes = ", ".join(f"{one.node_id} {one.evicted_blocks:,}" for one in done.nodes)
    output.line(f"{done.namespace_id}: {done.evicted_blocks:,} copies of blocks {verb}{kept}" + (f" ({nodes})" if nodes else ""))
