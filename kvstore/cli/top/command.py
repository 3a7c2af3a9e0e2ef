"""``kvstore top``: live view of a running store, like top(1)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import click

from kvstore.cli.support import output, param_types
from kvstore.cli.support.help import Command
from kvstore.cli.support.result import CommandOutput
from kvstore.cli.support.store_client import StoreConnection, ask, store_change
from kvstore.config.model import Config
from kvstore.core.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore.cli.top.stats import StoreRates, StoreSample

LEAST_S: Final = 0.5
MOST_S: Final = 60.0
_MOST_KEYS: Final = 64
_USUAL: Final = (80, 24)
"""Columns and lines of a terminal that does not report its size."""
_ENTER: Final = "\x1b[?1049h\x1b[?25l"  # alternate screen, hidden cursor
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_KEYS: Final = "q quit  sort by: n name  l loads  b bytes  t time  d dram  u queue"
_INVERSE, _BOLD, _PLAIN = "\x1b[7m", "\x1b[1m", "\x1b[m"


@click.command(cls=Command)
@click.option(
    "--interval",
    callback=param_types.some_seconds,
    default="2s",
    show_default=True,
    metavar="TIME",
    help="Time between two samples.",
)
@click.option("--once", is_flag=True, help="Print one interval and exit; default without a terminal.")
@click.option(
    "--sort", type=click.Choice(("name", "loads", "bytes", "time", "dram", "queue")), default="name", help="Order of nodes."
)
@store_change
def top(config: Config, *, interval: float, once: bool, sort: str) -> CommandOutput:
    """Show live statistics of a running store: loads, bytes by source, hits, latency, and a line per node.

    Loads are those of engines at their nodes. Hits are lookups at the metadata servers. Bytes
    loaded are split by source (DRAM, NVMe volumes, other nodes). The data plane column counts bytes between nodes and engines;
    links are whole NICs, in+out: the loopback interface also carries the traffic of other programs. p50 and p99 are upper bounds
    of histogram buckets. A state with ! means that the node did not answer. If the index is in Valkey, a line shows its shards.
    JSON: seconds, cluster, index, lookups_per_s, hit_ratio, loads by reach, nodes.

    Keys: q quits; n, l, b, t, d and u sort by name, loads, bytes, time, DRAM and queue.

    Examples:
      kvstore top
      kvstore top --interval 5s --sort bytes
      kvstore top --once | grep host-1
      kvstore top -o json | jq .hit_ratio
    """
    from kvstore.cli.top import stats

    if not LEAST_S <= interval <= MOST_S:
        raise click.BadParameter(f"between {LEAST_S:g} and {MOST_S:g} seconds", param_hint="--interval")
    order = next(key for key, (name, _) in stats.ORDERS.items() if name == sort)
    if not once and _is_live() and click.get_current_context().params["output_format"] == "table":
        ask(config, lambda store: _live(config, store, interval, order))
        return CommandOutput({}, lambda: None)
    found = ask(config, lambda store: _one(config, store, interval))

    def show() -> None:
        for line in stats.summary(found):
            output.line(line)
        output.table(stats.HEADING, stats.rows(found, order))

    return CommandOutput(stats.as_data(found), show)


def _is_live() -> bool:
    """Whether standard input and output are a terminal that can draw frames and send keys."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


async def look(config: Config, store: StoreConnection) -> StoreSample:
    """Query the metadata server and all nodes once.

    Raises:
        KVStoreError: the metadata server does not answer.
    """
    from kvstore.cli.top.stats import StoreSample
    from kvstore.control_api import serializers

    questions = store.queries
    cluster, shards, counters, nodes, statuses = await asyncio.gather(
        questions.cluster(config.client.metadata),
        questions.shards(),
        store.rpc.counters(),
        questions.nodes(),
        store.rpc.nodes(),
    )
    found = await questions.activities(list(statuses.values()))
    return StoreSample(
        at_s=time.monotonic(),
        cluster=cluster,
        shards=shards,
        counters=counters,
        nodes=nodes,
        volumes=[serializers.volume(status, info, None) for status in statuses.values() for info in status.node.volumes],
        activities={one.node_id: one for one in found.items},
        unreached=found.unreached,
    )


async def _one(config: Config, store: StoreConnection, interval_s: float) -> StoreRates:
    from kvstore.cli.top.stats import figures

    before = await look(config, store)
    await asyncio.sleep(interval_s)
    return figures(before, await look(config, store))


async def _live(config: Config, store: StoreConnection, interval_s: float, order: str) -> None:
    """Show frames until q, Ctrl-C or SIGTERM. Keys work during a query, and only one query runs at a time."""
    from kvstore.cli.top.stats import ORDERS, figures

    before: StoreSample | None = None
    found: StoreRates | None = None
    said = "looking ..."
    pressed: asyncio.Queue[str] = asyncio.Queue(_MOST_KEYS)
    with _screen(), _keys(pressed):
        looking = asyncio.create_task(_look_after(config, store, 0.0))
        key = asyncio.create_task(pressed.get())
        try:
            while True:
                _draw(found, order, said)
                await asyncio.wait({looking, key}, return_when=asyncio.FIRST_COMPLETED)
                if key.done():
                    if key.result() == "q":
                        return
                    order = key.result() if key.result() in ORDERS else order
                    key = asyncio.create_task(pressed.get())
                if looking.done():
                    try:
                        now = looking.result()
                    except KVStoreError as error:
                        said = f"no answer, trying again: {error}"
                    else:
                        if before is not None:
                            found, said = figures(before, now), ""
                        before = now
                    looking = asyncio.create_task(_look_after(config, store, LEAST_S if found is None else interval_s))
        finally:
            looking.cancel()
            key.cancel()
            await asyncio.gather(looking, key, return_exceptions=True)


async def _look_after(config: Config, store: StoreConnection, wait_s: float) -> StoreSample:
    await asyncio.sleep(wait_s)
    return await look(config, store)


def _draw(found: StoreRates | None, order: str, said: str) -> None:
    """Draw one frame, cut to the current size of the terminal so that it does not scroll."""
    from kvstore.cli.top.stats import HEADING, ORDERS, rows, summary

    columns, lines = (given or usual for given, usual in zip(os.get_terminal_size(sys.stdout.fileno()), _USUAL, strict=True))
    columns = max(columns - 1, 0)  # after the last column, the clear-line sequence would clear a character
    shown = [] if found is None else [output.clean(line)[:columns] for line in summary(found)]
    foot = output.clean(said or f"{_KEYS}  (now: {ORDERS[order][0]})")[:columns]
    if found is not None:
        cells = [HEADING, *([output.clean(cell) or output.NOTHING for cell in row] for row in rows(found, order))]
        table = [line[:columns] for line in output.aligned(cells)]
        space = max(lines - len(shown) - 2, 1)
        shown += ["", _INVERSE + table[0].ljust(columns) + _PLAIN, *table[1:space]]
    shown = shown[: max(lines - 1, 0)]
    shown += [""] * (lines - 1 - len(shown))
    frame = "\x1b[H" + "".join(f"{line}\x1b[K\r\n" for line in shown) + _BOLD + foot + _PLAIN + "\x1b[K"
    sys.stdout.write(frame)
    sys.stdout.flush()


@contextmanager
def _screen() -> Iterator[None]:
    """Use the alternate screen and unbuffered keys, and always restore the terminal."""
    terminal = sys.stdin.fileno()
    kept = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        raw = termios.tcgetattr(terminal)
        raw[6][termios.VSUSP] = b"\0"  # a stopped process could not restore the terminal
        termios.tcsetattr(terminal, termios.TCSANOW, raw)
        sys.stdout.write(_ENTER)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, kept)
        with suppress(OSError):  # the terminal was closed
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()


@contextmanager
def _keys(pressed: asyncio.Queue[str]) -> Iterator[None]:
    """Queue keys, and signals as keys. Drop them if the queue is full."""
    loop = asyncio.get_running_loop()
    terminal = sys.stdin.fileno()

    def press(key: str) -> None:
        with suppress(asyncio.QueueFull):
            pressed.put_nowait(key)

    def read() -> None:
        try:
            typed = os.read(terminal, _MOST_KEYS)
        except OSError:
            typed = b""
        for key in typed.decode(errors="replace") or "q":  # the terminal was closed
            press(key)

    signals = {signal.SIGINT: "q", signal.SIGTERM: "q", signal.SIGHUP: "q", signal.SIGWINCH: " "}
    loop.add_reader(terminal, read)
    for number, key in signals.items():
        loop.add_signal_handler(number, press, key)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        for number in signals:
            loop.remove_signal_handler(number)
