"""``kvstore events``: what the index learns, as it learns it, for people or for routers."""

from __future__ import annotations

import json
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Final

import click

from kvstore.cli.support.build_config import events_config, token
from kvstore.cli.support.config_options import setting_option, with_config
from kvstore.cli.support.help import Command
from kvstore.config.model import Config
from kvstore.process.graceful_shutdown import exit_now

if TYPE_CHECKING:
    from kvclient.events import BlockMirror, Change

_WATCH_S: Final = 0.2


@click.command(cls=Command)
@setting_option("--metadata", key="events.metadata", metavar="HOST:PORT", help="Address of the metadata server.")
@setting_option("--zmq", key="events.zmq", metavar="ENDPOINT", help="Publishes in vLLM's format: tcp://HOST:PORT or ipc://PATH.")
@setting_option("--replay", key="events.replay", metavar="ENDPOINT", help="Answers who missed something.")
@setting_option("--topic", key="events.topic", metavar="TEXT", help="First frame of each message.")
@setting_option("--namespace", key="events.namespaces", metavar="HEX,…", help="Blocks of these namespaces alone.")
@setting_option("--node", key="events.nodes", metavar="ID,…", help="Volumes of these nodes alone.")
@setting_option("--tier", key="events.tiers", metavar="NAME,…", help="Volumes of these tiers alone: hbm, dram, nvme.")
@with_config
def events(config: Config) -> None:
    """Tells which blocks are stored and removed: all that are there first, then each change, until SIGTERM or Ctrl-C.

    Without --zmq each change is a line of JSON for people and scripts: key, place, and who holds it now. With it, the command is
    a publisher in the format of vLLM's KV events: a router that follows an engine's events follows the store's in the same way. A
    block's hash is the last 8 bytes of its key (events.hashes = "bytes": the whole key); token ids are empty, as the store does
    not know them.

    Examples:
      kvstore events --tier dram
      kvstore events --zmq tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 --topic kv@store@my-model

    To a router that binds its SUB socket itself, for the volumes of one node:
      kvstore events --zmq tcp://router:5557 --set events.connect=true --node host-1
    """
    if config.events.zmq is None:
        _print_events(config)
        return
    try:
        from kvstore.events.main import run  # a daemon imports only what it runs
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is missing: pip install 'kvstore-dualpath[events]'") from error

    run(events_config(config, config.events.zmq))


def _print_events(config: Config) -> None:
    """A line of JSON a block whose holders have changed."""
    from kvclient.events import BlockWatcher

    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for wanted in (signal.SIGINT, signal.SIGTERM):
        signal.signal(wanted, on_signal)

    def show(mirror: BlockMirror, change: Change) -> None:
        try:
            _show(mirror, change)
        except BrokenPipeError:  # whoever read has seen enough
            stop.set()

    with BlockWatcher(
        config.events.metadata,
        namespaces=config.events.namespace_ids,
        nodes=config.events.node_ids,
        tiers=config.events.tier_kinds,
        tls=config.client.tls.resolve(),
        token=token(config.client),
        on_change=show,
    ) as watcher:
        while not stop.wait(_WATCH_S):
            watcher.check()
        if not watcher.close():  # nobody reads what it writes, and an end in order would wait for that
            exit_now(0)


def _show(mirror: BlockMirror, change: Change) -> None:
    if change.whole:
        click.echo(json.dumps({"snapshot": "complete" if mirror.complete else "begins"}))
    for key in [*(key for run in change.runs for key in run.keys), *change.keys]:
        place = mirror.place(key)
        line: dict[str, object] = {"key": key.hex()}
        if place is not None:
            line |= {"namespace": place[0].hex(), "depth": place[1]}
        line["held_by"] = [
            {"volume": volume.volume_id, "node": volume.node_id, "tier": volume.tier.name.lower(), "served": volume.served}
            for volume in mirror.replicas(key)
        ]
        click.echo(json.dumps(line))
