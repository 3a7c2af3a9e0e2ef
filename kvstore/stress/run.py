"""Run the passes of a stress run with several client processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Final

from kvstore.core.errors import Internal, Unavailable
from kvstore.stress.plan import StressPlan
from kvstore.stress.summary import PassSummary, StressResult
from kvstore.stress.worker import StressCommand, run_client

Watch = Callable[[str], AbstractContextManager[Callable[[PassSummary], None]]]
"""Opens the progress display of a pass by its name; the result is called with the totals to date."""
_END_S: Final = 5.0


def run_stress(plan: StressPlan, watch: Watch) -> StressResult:
    """Run the cold pass and the warm pass, with samples of the host's limit.

    Args:
        plan: settings.
        watch: shows the progress.

    Raises:
        Unavailable: a client could not connect.
        Internal: a session of a client has ended.
    """
    result = StressResult(plan, PassSummary("cold"), PassSummary("warm"))
    with _clients(plan) as pipes:
        for number, pipe in pipes.items():
            kind, said = _receive(pipe)
            if kind == "failed":
                raise Unavailable(str(said))
            if said:
                result.local_nodes[number] = str(said)
        with watch(StressCommand.COLD) as show:
            _pass(pipes, StressCommand.COLD, result.cold, show)
        with watch(StressCommand.WARM) as show:
            samples = _pass(pipes, StressCommand.WARM, result.warm, show)
        result.limit_kind = "memcpy" if result.local_nodes else "socket"
        result.limit_bytes_per_s = sum(size / seconds for size, seconds in samples if seconds)
    return result


@contextmanager
def _clients(plan: StressPlan) -> Iterator[dict[int, Connection]]:
    """Start the client processes; end them with the context. They are spawned, because gRPC does not survive a fork.

    Yields:
        The pipe of each session.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[int, Connection] = {}
    processes: list[SpawnProcess] = []
    try:
        for client in range(plan.clients):
            theirs: dict[int, Connection] = {}
            for number in range(client * plan.sessions, (client + 1) * plan.sessions):
                pipes[number], theirs[number] = context.Pipe()
            process = context.Process(target=run_client, args=(plan, theirs), name=f"stress-{client}", daemon=True)
            process.start()
            processes.append(process)
            for pipe in theirs.values():
                pipe.close()
        yield pipes
    finally:
        for pipe in pipes.values():
            pipe.close()  # a client that waits for a command ends
        deadline_s = time.monotonic() + _END_S
        for process in processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
            if process.is_alive():
                process.terminate()
                process.join()


def _receive(pipe: Connection) -> tuple[str, Any]:
    try:
        kind, said = pipe.recv()
    except (EOFError, ConnectionError) as error:
        raise Internal("a session of a client has ended; its error is above") from error
    return kind, said


def _pass(
    pipes: dict[int, Connection], command: StressCommand, summary: PassSummary, show: Callable[[PassSummary], None]
) -> list[tuple[int, float]]:
    """Give a command to all sessions and collect their totals. Returns what each session measured, if anything."""
    started_s = time.monotonic()
    for pipe in pipes.values():
        pipe.send(command)
    running = {pipe: number for number, pipe in pipes.items()}
    measured: list[tuple[int, float]] = []
    while running:
        ready = wait(list(running))
        for pipe in [pipe for pipe in running if pipe in ready]:
            kind, said = _receive(pipe)
            if kind == "totals":
                summary.add(running[pipe], *said)
            else:
                del running[pipe]
                if said is not None:
                    measured.append(said)
        summary.seconds = time.monotonic() - started_s
        show(summary)
    return measured
