"""``kvstore plans``, ``loads`` and ``path-policy``: planned loads, slow loads and the path policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import click

from kvstore.cli.support import output
from kvstore.cli.support.help import Command
from kvstore.cli.support.store_client import Store, ask, json_option, store_options, tell_unreached
from kvstore.config.model import Config

if TYPE_CHECKING:
    from kvstore.control_api.schemas.store import DecidedPart, Decision, LivePart, LivePlan, PathPolicy

MOST_LIVE: Final = 500
MOST_DECISIONS: Final = 256
MOST_LOADS: Final = 50
POLICIES: Final = ("prefill_only", "round_robin", "shorter_queue", "split")


@click.command(cls=Command)
@click.option(
    "--decisions", type=click.IntRange(0, MOST_DECISIONS), default=10, show_default=True, help="Number of recent decisions."
)
@json_option
@store_options
def plans(config: Config, *, decisions: int, as_json: bool) -> None:
    """Show planned loads in progress, and recent load decisions with their inputs.

    JSON: live (at most 500, by plan id) and decisions (newest first), with the fields of the REST's /plans and /decisions. Of
    several metadata workers, one answers: each plans for itself.

    Examples:
      kvstore plans
      kvstore plans --decisions 50 --json | jq '.decisions[] | select(.excluded != [])'
    """

    async def question(store: Store) -> tuple[list[LivePlan], list[Decision]]:
        return await store.queries.plans(MOST_LIVE), (await store.queries.decisions(decisions)).items

    live, decided = ask(config, question)
    if as_json:
        listed: dict[str, object] = {
            "live": [plan.model_dump(mode="json") for plan in live],
            "decisions": [one.model_dump(mode="json") for one in decided],
        }
        output.as_json(listed)
        return
    output.table(
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


@click.command(cls=Command)
@click.option("--limit", type=click.IntRange(1, MOST_LOADS), default=20, show_default=True, help="Number of loads.")
@json_option
@store_options
def loads(config: Config, *, limit: int, as_json: bool) -> None:
    """Show the slowest loads of the last minute on any node, slowest first, with the cause of their duration.

    Examples:
      kvstore loads
      kvstore loads --limit 1 --json | jq -r '.items[0].reason'
    """
    found = ask(config, lambda store: store.queries.slow_loads(limit))
    if as_json:
        output.as_json(found)
        return
    output.table(
        ("took", "ago", "node", "request", "blocks", "reason"),
        [
            (
                output.duration(one.seconds),
                output.duration(one.ago_s),
                one.node_id,
                one.request_id,
                f"{one.hit_blocks}/{one.blocks}",
                one.reason,
            )
            for one in found.items
        ],
    )
    tell_unreached(found.unreached)


@click.command("path-policy", cls=Command)
@click.argument("policy", type=click.Choice(POLICIES), required=False)
@click.option("--if-match", type=click.Choice(POLICIES), help="Change the policy only if this one is in force.")
@json_option
@store_options
def path_policy(config: Config, *, policy: str | None, if_match: str | None, as_json: bool) -> None:
    """Show the path policy, or change it to POLICY. It chooses the storage links for loads whose request names no policy.

    A change applies to new plans. After a restart of the metadata server, metadata.path_policy applies again.

    Examples:
      kvstore path-policy
      kvstore path-policy prefill_only --if-match split
    """
    if if_match is not None and policy is None:
        raise click.UsageError("--if-match requires POLICY")

    async def question(store: Store) -> PathPolicy:
        if policy is not None:
            await store.rpc.set_path_policy(policy, if_match)
        return await store.queries.path_policy()

    found = ask(config, question)
    if as_json:
        output.as_json(found)
    else:
        output.line(f"{found.policy} (configured: {found.configured})")


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
