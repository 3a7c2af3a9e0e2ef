"""``kvstore replay``: a recorded workload with real bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstore.cli.support import param_types
from kvstore.cli.support.config_options import refuse_unused, with_quiet_config
from kvstore.cli.support.help import Command
from kvstore.cli.support.result import CommandOutput, prints
from kvstore.cli.support.signals import orderly_exit
from kvstore.config.model import Config
from kvstore.tiers.eviction.policy import POLICY_NAMES

if TYPE_CHECKING:
    from kvstore.replay.capacity import StoreCapacity


@click.command(cls=Command)
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--block-bytes", callback=param_types.size, default="4KiB", show_default=True, metavar="SIZE", help="Block size.")
@click.option("--layers", type=click.IntRange(1, 1024), default=1, show_default=True, help="Layers per block.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N requests.")
@click.option(
    "--capacity",
    callback=param_types.capacity,
    metavar="dram=SIZE[,nvme=SIZE]",
    help="Capacity (default: enough for every block).",
)
@click.option("--policy", type=click.Choice(POLICY_NAMES), help="Eviction policy (default: node.policy of the configuration).")
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path), help="Folder of the volumes (default: temporary).")
@with_quiet_config
@prints
def replay(
    config: Config,
    *,
    trace: Path,
    block_bytes: int,
    layers: int,
    limit: int | None,
    capacity: StoreCapacity | None,
    policy: str | None,
    data_dir: Path | None,
) -> CommandOutput:
    """Replay a request TRACE against a temporary store: one lookup, load and store per request.

    Payloads are derived from block keys, so every loaded byte is checked. If every block fits, the hits equal those of an
    unlimited cache. Otherwise the policy's hits are shown beside the unlimited and the optimal (Belady) hits. "prompt blocks"
    are the blocks of all requests, "hits" those that the store had, and "hits, unlimited store" those of a store that never
    evicts.

    Reads Mooncake's JSON lines and run-length JSON lines, plain or compressed with zstd.

    Examples:
      kvstore replay conversation.jsonl.zst
      kvstore replay trace.jsonl --limit 500 --block-bytes 1MiB --capacity dram=2GiB,nvme=20GiB
      kvstore replay trace.jsonl --capacity dram=256MiB --policy lru -o json > result.json

    Exit code 1: a byte was wrong, or hits are missing although every block fits.
    """
    refuse_unused("a replay starts a store of its own; its space is --capacity", "node.policy", "log.")
    from rich.console import Console

    from kvstore.replay.capacity import space_for
    from kvstore.replay.plan import read_workload
    from kvstore.replay.progress import progress
    from kvstore.replay.report import print_summary
    from kvstore.replay.run import replay as run
    from kvstore.replay.run import replay_rows, verdict
    from kvstore.workload.traces import open_trace

    source = open_trace(trace)
    workload = read_workload(source.info, source, block_bytes, layers, limit)
    space = capacity or space_for(workload.unique_blocks, workload.spec.shape, data_dir or Path(tempfile.gettempdir()))
    space.check(workload.spec.shape)
    with orderly_exit(), progress(f"replay {source.info.name}", len(workload.chains)) as report:
        result = run(workload, space, policy or config.node.policy, data_dir, report)
    problem = verdict(result)

    def show() -> None:
        print_summary(f"replay of {source.info.name}", replay_rows(result), Console())

    return CommandOutput(result.to_json(), show, 0 if problem is None else 1, problem)
