"""``kvstore stress``: load a running store, check every byte, and compare the speed with this host's limit."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from kvstore.cli.support import output, param_types
from kvstore.cli.support.help import Command
from kvstore.cli.support.result import CommandOutput
from kvstore.cli.support.signals import orderly_exit
from kvstore.cli.support.store_client import EXIT_IN_PART, ask, store_change
from kvstore.config.model import Config
from kvstore.core.errors import InvalidArgument, KVStoreError
from kvstore.core.limits import MAX_SESSIONS, MAX_SESSIONS_OVER_TCP

if TYPE_CHECKING:
    from kvstore.stress.plan import OperationMix, StressPlan
    from kvstore.stress.summary import LatencyHistogram, PassSummary, StressResult

_MOST_CLIENTS: Final = 256
_MOST_SESSIONS: Final = 64
_MODEL_CHARS: Final = 48
_REACHED: Final = 0.95
"""Share of the wanted rate that counts as reached."""


@click.command(cls=Command)
@click.option("--clients", type=click.IntRange(1, _MOST_CLIENTS), default=2, show_default=True, help="Client processes.")
@click.option(
    "--block-size", callback=param_types.some_size, default="1MiB", show_default=True, metavar="SIZE", help="Size of a block."
)
@click.option(
    "--request-blocks", type=click.IntRange(1, 65_536), default=16, show_default=True, help="Blocks per request: one prompt."
)
@click.option(
    "--size",
    "total",
    callback=param_types.some_size,
    default="256MiB",
    show_default=True,
    metavar="SIZE",
    help="Bytes that the cold pass stores, all clients together.",
)
@click.option(
    "--hits",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Share of the blocks of a warm request that are stored; the others miss.",
)
@click.option(
    "--duration", callback=param_types.some_seconds, metavar="TIME", help="Length of the warm pass (default: each request once)."
)
@click.option(
    "--mix",
    callback=param_types.operation_mix,
    default="0:1:0",
    show_default=True,
    metavar="LOOKUP:LOAD:STORE",
    help="Weights of the operations of the warm pass. A load includes its lookup; a store adds new blocks.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="Start this many operations per second in the warm pass; a latency counts from the planned start (default: each starts"
    " when the last one ends).",
)
@click.option(
    "--sessions", type=click.IntRange(1, _MOST_SESSIONS), default=1, show_default=True, help="Sessions per client process."
)
@click.option(
    "--node",
    default="auto",
    show_default=True,
    metavar="ADDR",
    help="Local node: auto, an address, unix:PATH, or none (over TCP, as from a host without a node).",
)
@click.option("--tenant", default="", metavar="NAME", help="Tenant of the blocks, for a token of a tenant.")
@store_change
def stress(
    config: Config,
    *,
    clients: int,
    block_size: int,
    request_blocks: int,
    total: int,
    hits: float,
    duration: float | None,
    mix: OperationMix,
    rate: float | None,
    sessions: int,
    node: str,
    tenant: str,
) -> CommandOutput:
    """Measure a running store under load: a cold pass stores, a warm pass loads, and every loaded byte is checked.

    --mix sets the shares of lookups, loads and stores in the warm pass. Its stores keep adding blocks. Run the command once
    for each block size of interest.

    The clients are processes of this host and use the store as engines do. Their blocks are in a namespace of their own
    (kvstore-stress-HOST), and are removed at the end. A full store evicts other blocks to free space for them, so keep --size
    small on a store in use. Each session needs memory of four requests.

    Throughput is the sum of the sessions' rates while a call runs; making and checking the bytes does not count. The limit is
    measured by the same threads between their operations: one memcpy of a request, or a loopback TCP connection if no client
    has a local node.

    Examples:
      kvstore stress
      kvstore stress --clients 8 --size 4GiB --block-size 2MiB --duration 60s
      kvstore stress --node none --hits 0.5 -o json
      kvstore stress --mix 5:4:1 --rate 200 --sessions 8 --duration 30s

    The run fails if a byte was wrong, nothing could be stored or loaded, or every operation failed. It is partly done if its
    blocks could not be removed.
    """
    from kvstore.stress.plan import StressPlan
    from kvstore.stress.run import run_stress

    _check_sessions(clients * sessions, local=node == "auto" or node.startswith("unix:"))
    plan = StressPlan(
        metadata=config.client.metadata,
        node=None if node == "none" else node,
        tls=config.client.tls.resolve(),
        token_file=config.client.token_file,
        tenant=tenant,
        host=socket.gethostname()[:_MODEL_CHARS],
        run=secrets.randbits(63),
        clients=clients,
        block_bytes=block_size,
        layers=_layers(block_size),
        request_blocks=request_blocks,
        sessions=sessions,
        requests=_requests(total, block_size * request_blocks, clients * sessions),
        hit_share=hits,
        duration_s=duration,
        mix=mix,
        rate=rate,
    )
    ask(config, lambda store: store.rpc.server())  # its errors name the cause and the remedy
    with orderly_exit(), _alone(plan):
        try:
            result = run_stress(plan, lambda name: _progress(plan, name))
        finally:
            removed = _remove(config, plan)
    result.removed_blocks = removed
    exit_code = 1 if result.problem is not None else EXIT_IN_PART if removed is None else 0
    return CommandOutput(result.to_json(), lambda: _print(result), exit_code, result.problem)


def _check_sessions(sessions: int, *, local: bool) -> None:
    """Reject more sessions than one node takes: without a local node, all of them are over TCP."""
    most = MAX_SESSIONS if local else MAX_SESSIONS_OVER_TCP
    if sessions > most:
        kind = "sessions" if local else "sessions over TCP"
        raise click.UsageError(f"--clients times --sessions is {sessions}; a node takes at most {most} {kind}")


def _requests(total: int, request_bytes: int, sessions: int) -> int:
    """Return the requests of each session in the cold pass, which stores at most ``total`` bytes."""
    if total < request_bytes * sessions:
        raise click.UsageError(
            f"--size is less than one request per session: {sessions} sessions with requests of {output.size(request_bytes)}"
            f" require {output.size(request_bytes * sessions)}; raise --size, or lower --request-blocks, --clients or --sessions"
        )
    return total // (request_bytes * sessions)


def _layers(block_bytes: int) -> int:
    """Layers of a block: as many as divide its size, 32 at most."""
    return next(layers for layers in (32, 16, 8, 4, 2, 1) if block_bytes % layers == 0)


@contextmanager
def _alone(plan: StressPlan) -> Iterator[None]:
    """Hold a name of this host while a run uses its namespace, because the end of a run removes all blocks of it.

    Raises:
        InvalidArgument: another run of this host uses the namespace.
    """
    with socket.socket(socket.AF_UNIX) as holder:
        try:
            holder.bind(f"\0kvstore-stress-{plan.spec().namespace.hex()}")
        except OSError:
            raise InvalidArgument(
                "another kvstore stress of this host runs with the same block size; wait for its end, or choose another size"
            ) from None
        yield


@contextmanager
def _progress(plan: StressPlan, name: str) -> Iterator[Callable[[PassSummary], None]]:
    from kvstore.replay.progress import progress

    timed = plan.duration_s if name == "warm" else None
    total = plan.all_sessions * plan.requests if timed is None else round(timed)
    with progress(f"stress, {name} pass", total, unit="requests" if timed is None else "s") as report:

        def show(totals: PassSummary) -> None:
            hits = f", {totals.hit_ratio:.1%} hits, {totals.wrong_bytes} wrong bytes" if totals.blocks else ""
            done = totals.requests if timed is None else min(total, int(totals.seconds))
            report(done, f"{output.rate(totals.bytes_per_s)}{hits}")

        yield show


def _remove(config: Config, plan: StressPlan) -> int | None:
    """Remove the blocks of the run. Returns their number; None: some remain, which a note says."""
    namespace = plan.spec().namespace
    hint = f"kvstore namespaces invalidate {namespace.hex()}"
    try:
        done = ask(config, lambda store: store.commands.invalidate_namespace(namespace))
    except (KVStoreError, click.ClickException) as error:
        reason = error.format_message() if isinstance(error, click.ClickException) else str(error)
        output.note(f"the blocks of this run are not removed: {reason}. Remove them: {hint}")
        return None
    if not done.complete:
        output.note(f"some blocks of this run are not removed, because nodes did not answer. Remove them: {hint}")
        return None
    return done.evicted_blocks


def _print(result: StressResult) -> None:
    plan = result.plan
    where = ", ".join(sorted(set(result.local_nodes.values())))
    at = f"node {where}" if where else "no local node, so over TCP"
    output.line(
        f"{plan.all_sessions} sessions of {plan.clients} clients, {at}, requests of {plan.request_blocks} blocks"
        f" of {output.size(plan.block_bytes)}, {output.size(plan.stored_bytes)} in all"
    )
    warm = result.warm
    rows = [*_rows(result.cold), *_rows(warm)]
    kind = "memcpy" if result.limit_kind == "memcpy" else "socket"
    rows.append([f"limit: {kind}", "", output.rate(result.limit_bytes_per_s), "", "", "", ""])
    output.table(("pass", "requests", "throughput", "p50", "p99", "hits", "wrong bytes"), rows)
    facts = [
        ("loads reach", f"{output.share(warm.bytes_per_s, result.limit_bytes_per_s)} of the limit ({_limit(result)})"),
        ("hits expected", f"{result.expected_hit_ratio:.1%}"),
        ("operations", pace(warm.requests / warm.seconds, plan.rate)),
        ("lookups", _times(warm.lookups.to_json())),
        ("by tier", _shares(warm.by_tier)),
        ("by path", _shares(warm.by_path)),
        ("by node", _shares(warm.by_node)),
    ]
    if skipped := result.cold.outcomes["skipped"] + warm.outcomes["skipped"]:
        facts.append(("not stored", f"{skipped:,} blocks: no space, or the node drains"))
    if errors := result.cold.errors + warm.errors:
        facts.append(("failures", ", ".join(f"{kind}: {count}" for kind, count in errors.items())))
    if result.removed_blocks is not None:
        facts.append(("removed", f"{result.removed_blocks:,} block copies"))
    output.facts(facts)


def pace(reached: float, wanted: float | None) -> str:
    """Operations per second, and whether the wanted rate was reached."""
    if wanted is None:
        return f"{reached:.1f}/s"
    missed = "; the rate was not reached: give more --sessions, or a lower --rate" if reached < _REACHED * wanted else ""
    return f"{reached:.1f}/s of {wanted:g}/s wanted{missed}"


def _rows(one: PassSummary) -> list[list[str]]:
    """One row per operation of a pass. A pass with several has one throughput, in the row of its loads or the first one."""
    kinds = sorted(one.operations)
    main = "load" if "load" in kinds else kinds[0] if kinds else ""
    return [_row(one, kind, one.operations[kind], whole=kind == main) for kind in kinds]


def _row(one: PassSummary, kind: str, latencies: LatencyHistogram, *, whole: bool) -> list[str]:
    times = latencies.to_json()
    rate = output.rate(one.bytes_per_s) if whole else ""
    hits, wrong = (f"{one.hit_ratio:.1%}", f"{one.wrong_bytes:,}") if kind == "load" else ("", "")
    return [f"{one.name}: {kind}", f"{latencies.count:,}", rate, _ms(times["p50"]), _ms(times["p99"]), hits, wrong]


def _limit(result: StressResult) -> str:
    what = "one memcpy" if result.limit_kind == "memcpy" else "one loopback TCP connection"
    return f"{what} per session, measured {'before' if result.plan.rate else 'between'} its operations"


def _times(times: dict[str, float | None]) -> str:
    return f"p50 {_ms(times['p50'])}, p99 {_ms(times['p99'])}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}ms"


def _shares(sizes: dict[str, int]) -> str:
    whole = sum(sizes.values())
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {output.share(count, whole)}" for name, count in ordered if count)
