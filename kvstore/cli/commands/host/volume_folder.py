"""Check and repair the folder of a volume that no node has open."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.support.logs import first_lines
from kvstore.cli.support.result import CommandOutput
from kvstore.core.errors import Conflict, CorruptBlock

if TYPE_CHECKING:
    from kvstore.tiers.nvme.fsck import CheckReport


_LOG_LINES = 10
"""Maximum number of lines on bad slots; the summary counts all of them."""


def check_folder(path: Path, *, direct: bool, repair: bool = False) -> CommandOutput:
    """Read every block of a volume and verify headers and checksums.

    Args:
        path: folder of the volume.
        direct: read with O_DIRECT.
        repair: remove corrupt blocks and repair damage that prevents opening.

    Returns:
        The report. Its exit code is 1 if damage remains.

    Raises:
        click.ClickException: a node has the volume open, or the folder is not a volume.
    """
    from rich.console import Console

    from kvstore.replay.progress import progress
    from kvstore.tiers.nvme.fsck import check_volume

    _suggest_volumes(path)
    try:
        with first_lines(_LOG_LINES), progress("checking", 1, Console(file=sys.stderr), unit="done") as report:
            found = check_volume(path, repair=repair, direct=direct, progress=lambda done, total: report(done, "", total))
    except Conflict as error:
        raise click.ClickException(_in_use(path) or str(error)) from error
    hint = "" if repair else f"; repair it with kvstore volumes repair {shlex.quote(str(path))}"
    damage = None if found.ok else f"the volume is damaged{hint}"
    return CommandOutput(report_json(found), lambda: _print(found), 0 if found.ok else 1, damage)


def _in_use(path: Path) -> str | None:
    """Name the process that has a volume open, and how to check the volume online; None: unknown."""
    from kvstore.tiers.nvme.ownership import LOCK_FILE, SLAB_FILE, claim_in_force, home_of, name_at
    from kvstore.tiers.nvme.superblock import SUPERBLOCK_BYTES, newest_superblock

    try:
        with (path / SLAB_FILE).open("rb") as file:
            volume_id = newest_superblock(file.read(2 * SUPERBLOCK_BYTES))[0].volume_id
        claim = claim_in_force(path, home_of(volume_id))
        inode = (path / name_at(LOCK_FILE, claim.token)).stat().st_ino
        locks = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
    except (OSError, CorruptBlock):
        return None
    owner = next((words[4] for words in locks if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode)), "unknown")
    return (
        f"this volume is in use by node {claim.node_id} (process {owner}): check it while the node runs with"
        f" `kvstore volumes check {volume_id}`, or stop the node first"
    )


def _suggest_volumes(path: Path) -> None:
    """Reject a data folder of ``kvstore up``, which is not a volume, and name the volumes in it."""
    from kvstore.tiers.nvme.ownership import SLAB_FILE

    if (path / SLAB_FILE).exists():
        return
    inside = sorted(shlex.quote(str(folder)) for folder in path.glob("*-nvme") if (folder / SLAB_FILE).exists())
    if inside:
        raise click.ClickException(
            f"{path} contains volumes: check one with kvstore volumes check --offline {' or '.join(inside)}"
        )


def report_json(found: CheckReport) -> dict[str, Any]:
    """Convert a report to plain data."""
    return {
        "path": str(found.path),
        "volume_id": found.volume_id,
        "capacity_bytes": found.capacity_bytes,
        "ok": found.ok,
        "blocks": found.blocks,
        "good": found.good,
        "bad": found.bad,
        "orphans": found.orphans,
        "dropped": found.dropped,
        "bytes_read": found.bytes_read,
        "damage": found.damage,
        "mended": found.mended,
    }


def _print(found: CheckReport) -> None:
    click.echo(
        f"volume {found.volume_id} at {found.path}: {found.blocks:,} blocks, {found.good:,} good, {found.orphans:,} orphans"
    )
    for reason, count in sorted(found.bad.items()):
        click.echo(f"  bad: {count:,} {reason}")
    if found.dropped:
        click.echo(f"  dropped from the catalog: {found.dropped:,}")
    for damage in found.damage:
        click.echo(f"  damage: {damage}")
    for mended in found.mended:
        click.echo(f"  mended: {mended}")
