"""``kvstore volumes``: list, evict, check and repair."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstore.cli.commands.host.volume_folder import check_folder
from kvstore.cli.support import output, param_types, result
from kvstore.cli.support.config_options import with_quiet_config
from kvstore.cli.support.help import Resource
from kvstore.cli.support.result import CommandOutput
from kvstore.cli.support.store_client import (
    EXIT_IN_PART,
    StoreConnection,
    ask,
    complete_nodes,
    complete_volumes,
    confirm,
    store_change,
    store_query,
    yes_option,
)
from kvstore.config.model import Config

if TYPE_CHECKING:
    from kvstore.control_api.schemas.store import Volume
    from kvstore.control_api.volume_checks import VolumeCheck

_POLL_S = 0.3


@click.group(cls=Resource)
def volumes() -> None:
    """List, evict, check and repair volumes. Without a command, list them.

    Examples:
      kvstore volumes
      kvstore volumes evict host-1/nvme0 --to 50
      kvstore volumes check host-1/nvme0 --wait
      kvstore volumes check --offline /mnt/nvme0/kvstore
    """


@volumes.command("list")
@click.option("--node", metavar="NODE", shell_complete=complete_nodes, help="Only volumes of this node.")
@store_query
def list_volumes(config: Config, *, node: str | None) -> CommandOutput:
    """List the volumes of running nodes with tier, usage, blocks and whether they are writable.

    Examples:
      kvstore volumes list
      kvstore volumes list --node host-1 -o json | jq '.items[] | select(.read_only)'
    """

    async def found(store: StoreConnection) -> list[Volume]:
        if node is not None:
            await store.rpc.node(node)  # an unknown id is an error, not an empty list
        return await store.queries.volumes(await store.queries.known_volumes(node))

    known = ask(config, found)
    return result.table(
        known,
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


@volumes.command()
@click.argument("volume", shell_complete=complete_volumes)
@click.option("--to", "percent", type=click.IntRange(0, 100), required=True, help="Target usage in percent.")
@yes_option
@store_change
def evict(config: Config, *, volume: str, percent: int, yes: bool) -> CommandOutput:
    """Evict the coldest blocks of VOLUME (NODE/NAME) down to a usage.

    Blocks in use and dirty DRAM blocks stay. Asks for confirmation.

    Examples:
      kvstore volumes evict host-1/nvme0 --to 50
      kvstore volumes evict host-1/dram --to 0 --yes
    """
    node_id, name = _parts(volume)
    confirm(f"Evict the coldest blocks of {volume} down to {percent} % of its capacity", yes=yes)
    done = ask(config, lambda store: store.commands.evict_volume(node_id, name, percent))
    kept = f", {done.kept_blocks:,} stay as they are in use or not durable" if done.kept_blocks else ""
    return result.line(done, f"{volume}: {done.evicted_blocks:,} blocks evicted{kept}; {output.size(done.used_bytes)} used")


@volumes.command()
@click.argument("volume", shell_complete=complete_volumes)
@click.option("--offline", is_flag=True, help="VOLUME is the folder of a volume that no node has open.")
@click.option("--buffered", is_flag=True, help="With --offline: read without O_DIRECT.")
@click.option("--wait", is_flag=True, help="Wait for the end of the check. Ctrl-C does not cancel it.")
@click.option("--status", "status_only", is_flag=True, help="Show progress or result; begin no check.")
@click.option("--cancel", is_flag=True, help="Cancel the check in progress.")
@click.option(
    "--rate",
    callback=param_types.some_size,
    metavar="SIZE",
    help="Read rate limit per second (default: a tenth of the measured rate; below 2GB/s 200MB, at most half).",
)
@store_change
def check(
    config: Config, *, volume: str, offline: bool, buffered: bool, wait: bool, status_only: bool, cancel: bool, rate: int | None
) -> CommandOutput:
    """Verify the checksums of every block of VOLUME.

    VOLUME is the id (NODE/NAME) of a volume of a running node. The node checks it in the background and quarantines bad
    blocks, which are misses afterwards. A node forgets its checks when it restarts.

    With --offline, VOLUME is a folder. The node that owns it must be stopped. Every block is read here, nothing is changed, and
    no metadata server is needed.

    Examples:
      kvstore volumes check host-1/nvme0 --wait
      kvstore volumes check host-1/nvme0 --rate 50MB
      kvstore volumes check host-1/nvme0 --status -o json | jq .bad_blocks
      kvstore volumes check --offline /mnt/nvme0/kvstore

    Exit codes: 0 done, and no bad block was found; 1 failed, no answer, or bad or unreadable blocks were found; 2 usage error;
    3 rejected or not found; 4 the check was cancelled.
    """
    if offline:
        if status_only or cancel or wait or rate is not None:
            raise click.UsageError("--status, --cancel, --wait and --rate apply to volumes of running nodes, not to --offline")
        return check_folder(Path(volume), direct=not buffered)
    if buffered:
        raise click.UsageError("--buffered requires --offline")
    if status_only + cancel + (wait or rate is not None) > 1:
        raise click.UsageError("--status, --cancel and --wait or --rate exclude each other")
    node_id, name = _parts(volume)

    async def found(store: StoreConnection) -> VolumeCheck:
        if status_only:
            return await store.checks.status(node_id, name)
        if cancel:
            return await store.checks.cancel(node_id, name)
        begun = await store.checks.begin(node_id, name, rate)
        return await _wait_for_check(store, node_id, name) if wait else begun

    done = ask(config, found)
    return CommandOutput(done, lambda: output.line(_summary(done)), 0 if cancel or not done.ended else _exit_code(done))


@volumes.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--buffered", is_flag=True, help="Read without O_DIRECT.")
@with_quiet_config
@result.prints
def repair(_config: Config, *, folder: Path, buffered: bool) -> CommandOutput:
    """Check the volume in FOLDER, remove corrupt blocks and repair damage that prevents opening.

    The node that owns the volume must be stopped. Exit code 1: damage remains.

    Examples:
      kvstore volumes repair /mnt/nvme0/kvstore
    """
    return check_folder(folder, direct=not buffered, repair=True)


def _exit_code(done: VolumeCheck) -> int:
    if done.state == "cancelled":
        return EXIT_IN_PART
    return int(done.state == "failed" or bool(done.bad_blocks or done.unreadable_blocks))


async def _wait_for_check(store: StoreConnection, node_id: str, name: str) -> VolumeCheck:
    """Show the progress of a check until it ends."""
    from rich.console import Console

    from kvstore.replay.progress import progress

    with progress("checking", 1, Console(file=sys.stderr), unit="blocks") as report:
        while True:
            done = await store.checks.status(node_id, name)
            if done.state == "none":
                raise click.ClickException(f"{done.volume_id}: the node was restarted, which ended the check")
            report(done.checked_blocks, "", done.blocks)
            if done.ended:
                return done
            await asyncio.sleep(_POLL_S)


def _summary(done: VolumeCheck) -> str:
    """State of a check in one line."""
    if done.state == "none":
        return f"{done.volume_id}: no check since the node started"
    phrases = [f"{done.volume_id}: {done.state}", f"{done.checked_blocks:,} of {done.blocks:,} blocks checked"]
    if done.bad_blocks:
        phrases.append(f"{done.bad_blocks:,} corrupt and removed")
    if done.rewritten_blocks:
        phrases.append(f"{done.rewritten_blocks:,} of them written again from DRAM")
    if done.unreadable_blocks:
        phrases.append(f"{done.unreadable_blocks:,} unreadable")
    if done.gone_blocks:
        phrases.append(f"{done.gone_blocks:,} evicted meanwhile")
    if done.checked_bytes:
        phrases.append(f"{output.size(done.checked_bytes)} read in {output.duration(done.took_s)}")
    return ", ".join([*phrases, *([done.why] if done.why else [])])


def _parts(volume: str) -> tuple[str, str]:
    """Parse NODE/NAME."""
    node_id, _, name = volume.partition("/")
    if not name:
        raise click.BadParameter(
            "a volume is NODE/NAME, as listed by kvstore volumes; --offline checks a folder", param_hint="VOLUME"
        )
    return node_id, name
