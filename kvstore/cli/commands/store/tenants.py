"""``kvstore tenants``: usage and quotas of tenants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from kvstore.cli.support import output, param_types, result
from kvstore.cli.support.help import Resource
from kvstore.cli.support.result import CommandOutput
from kvstore.cli.support.store_client import StoreConnection, ask, confirm, store_change, store_query, yes_option
from kvstore.config.model import Config

if TYPE_CHECKING:
    from kvstore.control_api.schemas.retention import Quota, TenantTier

_ANY: Final = "any"
_argument = click.argument("tenant")


def _bound(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    """Parse a size or ``any`` (no quota); None: not given."""
    return value if value == _ANY else param_types.size(ctx, param, value)


@click.group(cls=Resource)
def tenants() -> None:
    """List tenants with their usage, and set quotas. Without a command, list them.

    The tenant of a namespace is part of its spec. The name of the default tenant is empty ('').

    Examples:
      kvstore tenants
      kvstore tenants set team-a --dram 64GiB --nvme 1TiB
      kvstore tenants unset team-a
    """


@tenants.command("list")
@store_query
def list_tenants(config: Config) -> CommandOutput:
    """List tenants with usage or quota, in payload bytes by tier over all nodes.

    Examples:
      kvstore tenants list
      kvstore tenants list -o json | jq '.items[] | select(.nvme.quota_bytes)'
    """
    known = ask(config, lambda store: store.queries.tenants())
    return result.table(
        known,
        ("tenant", "dram", "dram quota", "nvme", "nvme quota", "nodes"),
        [(one.tenant, *_tier(one.dram), *_tier(one.nvme), str(one.nodes)) for one in known],
    )


@tenants.command("set")
@_argument
@click.option("--dram", metavar="SIZE|any", callback=_bound, help="Quota in DRAM over all nodes; any: no quota.")
@click.option("--nvme", metavar="SIZE|any", callback=_bound, help="Quota on NVMe volumes over all nodes; any: no quota.")
@yes_option
@store_change
def set_quota(config: Config, *, tenant: str, dram: int | str | None, nvme: int | str | None, yes: bool) -> CommandOutput:
    """Set the quota of TENANT in the given tiers; other tiers keep theirs.

    The tenant's coldest blocks above the quota are evicted. Asks for confirmation in this case.

    Examples:
      kvstore tenants set team-a --dram 64GiB
      kvstore tenants set team-a --nvme 1TiB --dram any --yes
      kvstore tenants set '' --nvme 500GiB
    """
    if dram is None and nvme is None:
        raise click.UsageError("give a quota: --dram SIZE, --nvme SIZE or both")

    def changed(before: int | None, said: int | str | None) -> int | None:
        return before if said is None else said if isinstance(said, int) else None

    before = ask(config, lambda store: store.queries.quota(tenant))
    wanted = changed(before.dram_bytes, dram), changed(before.nvme_bytes, nvme)
    held = next((one for one in ask(config, lambda store: store.queries.tenants()) if one.tenant == tenant), None)
    if held is not None:
        beyond = [
            f"{output.size(tier.held_bytes - most)} in {name}"
            for name, tier, most in (("DRAM", held.dram, wanted[0]), ("NVMe", held.nvme, wanted[1]))
            if most is not None and tier.held_bytes > most
        ]
        if beyond:
            confirm(f"Let tenant {_named(tenant)} lose its coldest blocks, {' and '.join(beyond)}", yes=yes)
    return _set(config, tenant, before, wanted)


@tenants.command("unset")
@_argument
@store_change
def unset_quota(config: Config, *, tenant: str) -> CommandOutput:
    """Remove the quota of TENANT in both tiers.

    Examples:
      kvstore tenants unset team-a
    """
    before = ask(config, lambda store: store.queries.quota(tenant))
    if before.dram_bytes is None and before.nvme_bytes is None:
        return result.line(before, f"{_named(tenant)} has no quota: nothing changed")
    return _set(config, tenant, before, (None, None))


def _set(config: Config, tenant: str, before: Quota, wanted: tuple[int | None, int | None]) -> CommandOutput:
    async def change(store: StoreConnection) -> tuple[Quota, Quota]:
        return await store.commands.set_quota(tenant, *wanted, expected=before)

    done, _ = ask(config, change)
    return result.line(done, f"{_named(tenant)}: dram {_most(done.dram_bytes)}, nvme {_most(done.nvme_bytes)}")


def _named(tenant: str) -> str:
    return tenant or "'' (the default tenant)"


def _most(bound: int | None) -> str:
    return _ANY if bound is None else output.size(bound)


def _tier(tier: TenantTier) -> tuple[str, str]:
    return output.size(tier.held_bytes), "" if tier.quota_bytes is None else output.size(tier.quota_bytes)
