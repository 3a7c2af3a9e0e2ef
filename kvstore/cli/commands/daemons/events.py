"""``kvstore events``: block events, for people or for routers."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Final

import click

from kvstore.cli.support.build_config import events_config, token
from kvstore.cli.support.config_options import cluster_option, setting_option, with_config
from kvstore.cli.support.help import Command
from kvstore.cli.support.result import item, output_option
from kvstore.config.model import Config
from kvstore.core.errors import install_command
from kvstore.process.graceful_shutdown import exit_now

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvclient.events import BlockMirror, Change
    from kvstore.core.types import BlockKey

_WATCH_S: Final = 0.2


@click.command(cls=Command)
@setting_option("--metadata", key="events.metadata", metavar="HOST:PORT[,...]", help="Metadata servers.")
@setting_option("--zmq", key="events.zmq", metavar="ENDPOINT", help="Publish in vLLM's format at tcp://HOST:PORT or ipc://PATH.")
@setting_option("--replay", key="events.replay", metavar="ENDPOINT", help="Endpoint for replaying missed batches.")
@setting_option("--model", key="events.model", metavar="NAME", help="Publish this model's blocks with tokens and engine hashes.")
@setting_option("--pool", key="events.pool", metavar="NAME", help="Name of the store in the topic of a model.")
@setting_option("--topic", key="events.topic", metavar="TEXT", help="First frame of each message.")
@setting_option("--namespace", key="events.namespaces", metavar="HEX,…", help="Only blocks of these namespaces.")
@setting_option("--node", key="events.nodes", metavar="ID,…", help="Only volumes of these nodes.")
@setting_option("--tier", key="events.tiers", metavar="NAME,…", help="Only volumes of these tiers: hbm, dram, nvme.")
@output_option
@cluster_option
@with_config
def events(config: Config, *, output_format: str) -> None:
    """Report stored and removed blocks: first all present blocks, then each change, until SIGTERM or Ctrl-C.

    Without --zmq, each change is a line (YAML: a document) with the key, its chain position and its replicas. With --zmq, the
    command publishes vLLM's KV events. For a router, name a model, and run one publisher per model: the events then have the
    engine's block hashes and the tokens. Only blocks that engines label are published (option block_labels of the vLLM hooks).

    Without a model, the hash of a block is the last 8 bytes of the store's key (events.hashes = "bytes": the whole key), and
    token ids are empty. Routers that hash tokens, such as llm-d's and Dynamo's, cannot use these events.

    Examples:
      kvstore events --tier dram
      kvstore events -o json | jq -r 'select(.held_by == []).key'
      kvstore events --zmq tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 --model my-model

    Connect to a router that binds its SUB socket, for the volumes of one node (topic kv@node:host-1@my-model):
      kvstore events --zmq tcp://router:5557 --set events.connect=true --model my-model --node host-1
    """
    if config.events.zmq is None:
        if config.events.model:
            raise click.UsageError("--model requires --zmq; without --zmq, select blocks with --namespace")
        _print_events(config, output_format)
        return
    try:
        from kvstore.events.main import run  # a daemon imports only what it runs
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is missing: {install_command('events')}") from error

    run(events_config(config, config.events.zmq))


def _print_events(config: Config, output_format: str) -> None:
    """Print each block whose replicas changed."""
    from kvclient.events import BlockWatcher

    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for wanted in (signal.SIGINT, signal.SIGTERM):
        signal.signal(wanted, on_signal)

    def show(mirror: BlockMirror, change: Change) -> None:
        try:
            _show(mirror, change, output_format, stop)
        except BrokenPipeError:  # the reader closed the pipe
            stop.set()

    with BlockWatcher(
        config.events.metadata,
        namespaces=config.events.namespace_ids,
        nodes=config.events.node_ids,
        tiers=config.events.tier_kinds,
        tls=config.client.tls.resolve(),
        token=token(config.client),
        most_blocks=config.events.max_blocks,
        on_change=show,
    ) as watcher:
        while not stop.wait(_WATCH_S):
            watcher.check()
        if not watcher.close():  # an orderly exit would wait for the reader of its output
            exit_now(0)


def _show(mirror: BlockMirror, change: Change, output_format: str, stop: threading.Event) -> None:
    """Print changed blocks, each once per message, and a snapshot when it is complete.

    A snapshot reports a block once per replica, and again if it changes before the end. So the blocks are read from the mirror.
    """
    keys: Iterable[BlockKey] = ()
    if change.whole and not mirror.complete:
        item({"snapshot": "begins"}, "snapshot begins", output_format)
    elif change.whole:
        keys = mirror
    elif mirror.complete:
        keys = dict.fromkeys([*(key for run in change.runs for key in run.keys), *change.keys])
    for key in keys:
        if stop.is_set():
            return
        _show_block(mirror, key, output_format)
    if change.whole and mirror.complete:
        item({"snapshot": "complete"}, "snapshot complete", output_format)


def _show_block(mirror: BlockMirror, key: BlockKey, output_format: str) -> None:
    place = mirror.place(key)
    replicas = mirror.replicas(key)
    line: dict[str, object] = {"key": key.hex()}
    if place is not None:
        line |= {"namespace": place[0].hex(), "depth": place[1]}
    line["held_by"] = [
        {"volume": volume.volume_id, "node": volume.node_id, "tier": volume.tier.name.lower(), "served": volume.served}
        for volume in replicas
    ]
    position = "" if place is None else f"  namespace {place[0].hex()}  depth {place[1]}"
    held_by = ", ".join(volume.volume_id + ("" if volume.served else " (cannot be read now)") for volume in replicas)
    item(line, f"{key.hex()}{position}  {f'held by {held_by}' if held_by else 'held by no volume'}", output_format)
