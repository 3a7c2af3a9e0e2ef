"""``kvstore plans``, ``loads`` and ``policy``: planned loads, slow loads and the path policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import click

from kvstore.cli.support import output, result
from kvstore.cli.support.help import Resource, ShownResource
from kvstore.cli.support.result import CommandOutput
from kvstore.cli.support.store_client import StoreConnection, ask, store_change, store_query, tell_unreached
from kvstore.config.model import Config

if TYPE_CHECKING:
    from kvstore.control_api.schemas.store import DecidedPart, Decision, LivePart, LivePlan, PathPolicy

MOST_LIVE: Final = 500
MOST_DECISIONS: Final = 256
MOST_LOADS: Final = 50
POLICIES: Final = ("prefill_only", "round_robin", "shorter_queue", "split")


@click.group(cls=Resource)
def plans() -> None:
    """Show planned loads and recent load decisions. Without a command, list them.

    Examples:
      kvstore plans
      kvstore plans --watch 1
    """


@plans.command("list")
@click.option(
    "--decisions", type=click.IntRange(0, MOST_DECISIONS), default=10, show_default=True, help="Number of recent decisions."
)
@store_query
def list_plans(config: Config, *, decisions: int) -> CommandOutput:
    """List planned loads in progress, and recent load decisions with their inputs.

    JSON: live (at most 500, by plan id) and decisions (newest first), with the fields of the REST's /plans and /decisions.

    Examples:
      kvstore plans list
      kvstore plans list --decisions 50 -o json | jq '.decisions[] | select(.excluded != [])'
    """

    async def question(store: StoreConnection) -> tuple[list[LivePlan], list[Decision]]:
        return await store.queries.plans(MOST_LIVE), (await store.queries.decisions(decisions)).items

    live, decided = ask(config, question)
    return result.table(
        {
            "live": [plan.model_dump(mode="json") for plan in live],
            "decisions": [one.model_dump(mode="json") for one in decided],
        },
        ("plan", "is", "policy", "prefill", "decode", "blocks", "bytes", "time", "reads", "why"),
        [
            *(
                (
                    *_request(plan, "live"),
                    f"ends in {output.duration(plan.expires_in_s)}",
                    _parts(plan.parts),
                    ", ".join(f"{part.node_id} {part.left} left" for part in plan.parts if part.left),
                )
                for plan in live
            ),
            *(
                (
                    *_request(one, f"decided {output.duration(one.ago_s)} ago"),
                    f"predicted {output.duration(one.predicted_s)}",
                    _parts(one.parts),
                    _why(one),
                )
                for one in decided
            ),
        ],
    )


@click.group(cls=Resource)
def loads() -> None:
    """Show the slowest loads of the last minute and their causes. Without a command, list them.

    Examples:
      kvstore loads
      kvstore loads --watch
    """


@loads.command("list")
@click.option("--limit", type=click.IntRange(1, MOST_LOADS), default=20, show_default=True, help="Number of loads.")
@store_query
def list_loads(config: Config, *, limit: int) -> CommandOutput:
    """List the slowest loads of the last minute on any node, slowest first, with the cause of their duration and what to do.

    Examples:
      kvstore loads list
      kvstore loads list --limit 1 -o json | jq -r '.items[0].reason'
    """
    found = ask(config, lambda store: store.queries.slow_loads(limit))
    tell_unreached(found.unreached)
    return result.table(
        found,
        ("took", "ago", "node", "request", "blocks", "reason", "to do"),
        [
            (
                output.duration(one.seconds),
                output.duration(one.ago_s),
                one.node_id,
                one.request_id,
                f"{one.hit_blocks}/{one.blocks}",
                one.reason,
                one.action or "",
            )
            for one in found.items
        ],
    )


@click.group(cls=ShownResource)
def policy() -> None:
    """Show or set the path policy, which chooses the storage links of loads. Without a command, show it.

    Examples:
      kvstore policy
      kvstore policy set split
    """


@policy.command("show")
@store_query
def show_policy(config: Config) -> CommandOutput:
    """Show the path policy. It applies to loads whose request names no policy.

    Examples:
      kvstore policy show
      kvstore policy show -o json | jq -r .policy
    """
    return _policy(ask(config, lambda store: store.queries.path_policy()))


@policy.command("set")
@click.argument("policy", type=click.Choice(POLICIES))
@click.option("--if-match", type=click.Choice(POLICIES), help="Change the policy only if this one is in force.")
@store_change
def set_policy(config: Config, *, policy: str, if_match: str | None) -> CommandOutput:
    """Set the path policy of new plans to POLICY.

    It holds over restarts, instead of metadata.path_policy, until that policy is set again.

    Examples:
      kvstore policy set prefill_only --if-match split
    """

    async def change(store: StoreConnection) -> PathPolicy:
        await store.rpc.set_path_policy(policy, if_match)
        return await store.queries.path_policy()

    return _policy(ask(config, change))


def _policy(found: PathPolicy) -> CommandOutput:
    return result.line(found, f"{found.policy} (configured: {found.configured})")


def _request(plan: LivePlan | Decision, what: str) -> tuple[str, ...]:
    size = output.size(plan.blocks * plan.block_bytes)
    return (plan.plan_id, what, plan.policy, plan.prefill_node, plan.decode_node or "", str(plan.blocks), size)


def _parts(parts: Iterable[LivePart | DecidedPart]) -> str:
    return ", ".join(f"{part.count} by {part.node_id} ({part.side})" for part in parts)


def _why(decision: Decision) -> str:
    """Inputs of a decision."""
    seen = [
        f"{one.node_id} {output.size(one.pending_bytes)} waiting at {output.rate(one.storage_bytes_per_s)}"
        for one in decision.considered
    ]
    if decision.attempt:
        seen.insert(0, f"attempt {decision.attempt + 1}: a part had failed")
    if decision.excluded:
        seen.append(f"not {', '.join(decision.excluded)}")
    return "; ".join(seen)
