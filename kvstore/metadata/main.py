"""Process entry of the metadata server: one process, or several that share a port and an index."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Final

from kvstore.config.metadata import MetadataConfig
from kvstore.core.errors import Unavailable
from kvstore.core.types import NamespaceId
from kvstore.metadata.server import MetadataServer
from kvstore.observe import tracing
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.process import gc_tuning
from kvstore.process.fd_limits import raise_limit
from kvstore.process.graceful_shutdown import SIGNALS, GracefulShutdown, SignalCounter, exit_now
from kvstore.process.ready_file import write_ready_file
from kvstore.rpc.address import cannot_listen

logger = logging.getLogger(__name__)

_START_TIMEOUT_S: Final = 30.0
_STOP_MARGIN_S: Final = 5.0
"""Time between a worker's deadline and its kill."""
_MAX_RESTARTS: Final = 5
_RESTART_WINDOW_S: Final = 60.0
_DAMAGED_EXIT: Final = 75
"""Exit code of a worker whose index must be recreated: it is damaged, or a rebuild was requested."""
_SWITCH_INTERVAL_S: Final = 0.0005
"""Maximum time that the index thread holds the interpreter while a lookup waits. Python's default, 5 ms, would show in p99."""


def run(config: MetadataConfig, set_up: Callable[[], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then stop gracefully within ``stop_grace_ms``. A second signal ends the process at once.

    Args:
        config: configuration.
        set_up: sets up logs and traces in each worker process. Must be picklable.

    Raises:
        Unavailable: the address cannot be bound, the index cannot be opened, or workers die repeatedly.
        InvalidArgument: TLS files cannot be read.
    """
    raise_limit()
    if config.workers == 1:
        asyncio.run(_serve(config, 0, _Announcer(config.ready_file), None))
    else:
        _Supervisor(config, set_up).run()


class _Announcer:
    """Announces that the server is ready: in the log, and in the ready file if one is configured."""

    def __init__(self, ready_file: Path | None) -> None:
        self._ready_file = ready_file

    def ready(self, address: str, metrics_address: str) -> None:
        logger.info("ready on %s", address)
        if self._ready_file is not None:
            # several metrics addresses are separated by commas
            write_ready_file(self._ready_file, address=address, metrics_address=metrics_address)


class _Pipe(_Announcer):
    """Announces to the supervisor that a worker is ready."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(None)
        self._connection = connection

    def ready(self, address: str, metrics_address: str) -> None:
        self._connection.send((address, metrics_address))


async def _serve(config: MetadataConfig, worker: int, announcer: _Announcer, parent: int | None) -> None:
    """Run one server process until a signal arrives or, in a worker, its supervisor has ended.

    A damaged index is recreated while the process runs, at the same address. Nodes notice its new epoch and send their
    inventories.

    Raises:
        _IndexDamaged: in a worker: all workers must close the shared index before it can be recreated.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    grace_s = config.stop_grace_ms / 1000
    leaving = GracefulShutdown(grace_s, leave.set)
    leaving.listen()
    if parent is not None:
        loop.add_reader(parent, leaving.begin)
    counters = Counters()
    namespaces: Sequence[tuple[NamespaceId, bytes]] = ()
    while True:
        server = MetadataServer(config, worker=worker, counters=counters, namespaces=namespaces)
        try:
            address = await server.start()
        except Unavailable:
            await asyncio.sleep(0)  # the report of damage arrives through the event loop
            if parent is not None or not server.damaged.is_set():
                raise
            # opening did not notice the damage, and the index is marked now: a new server drops it, or fails for good
            logger.critical("index damaged: recreating it", exc_info=True)
            server = MetadataServer(config, worker=worker, counters=counters, namespaces=namespaces)
            address = await server.start()
        gc_tuning.freeze_startup_objects()
        announcer.ready(address, server.metrics_address)
        await _first_of(leave, server.damaged)
        namespaces = server.kept_namespaces
        await server.stop(grace_s)
        if leave.is_set():
            break
        logger.critical("index damaged or rebuild requested: recreating it")
        if parent is not None:
            raise _IndexDamaged
        counters.add(metadata_metrics.INDEX_RESTARTS)
        config = config.model_copy(update={"listen": address})
    if parent is not None:
        loop.remove_reader(parent)
    await asyncio.to_thread(tracing.shut_down)


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


class _IndexDamaged(Exception):
    """The index that the workers share must be recreated."""


def _work(config: MetadataConfig, worker: int, connection: Connection, set_up: Callable[[], None] | None) -> None:
    """Entry of a worker process."""
    if set_up is not None:
        set_up()
    else:
        logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s metadata[{worker}] %(name)s: %(message)s")
    parent = multiprocessing.parent_process()
    assert parent is not None
    try:
        asyncio.run(_serve(config, worker, _Pipe(connection), int(parent.sentinel)))
    except _IndexDamaged:
        sys.exit(_DAMAGED_EXIT)


class _Supervisor:
    """Keeps N workers running. Its own process never starts gRPC."""

    def __init__(self, config: MetadataConfig, set_up: Callable[[], None] | None) -> None:
        self._config = config
        self._set_up = set_up
        self._metrics: dict[int, str] = {}
        self._context = multiprocessing.get_context("spawn")
        self._workers: dict[int, SpawnProcess] = {}
        self._restarts: deque[float] = deque()
        self._signals = SignalCounter()

    def run(self) -> None:
        wake, waker = socket.socketpair()
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno())
        for number in SIGNALS:
            signal.signal(number, self._on_signal)  # the byte in the socket pair wakes the supervisor
        with wake, waker, _reserve_port(self._config.listen) as reserved:
            host = self._config.listen.rpartition(":")[0]
            config = self._config.model_copy(update={"listen": f"{host}:{reserved.getsockname()[1]}"})
            try:
                for worker in range(config.workers):
                    self._start(config, worker)
                _Announcer(config.ready_file).ready(config.listen, ",".join(self._metrics.values()))
                self._watch(config, wake)
            finally:
                signal.set_wakeup_fd(-1)
                self._stop_all()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signals.is_repeated(number):
            for process in self._workers.values():
                process.kill()
            exit_now(128 + number)

    def _watch(self, config: MetadataConfig, wake: socket.socket) -> None:
        while True:
            sentinels = {process.sentinel: worker for worker, process in self._workers.items()}
            ready = multiprocessing.connection.wait([wake, *sentinels])
            if wake in ready:  # first: Ctrl-C also reaches the workers, which then end as intended
                return
            for worker in (sentinels[item] for item in ready if isinstance(item, int)):
                self._workers[worker].join()
                self._allow_restart()
                if self._workers[worker].exitcode == _DAMAGED_EXIT:
                    logger.critical("worker %d reported a damaged index: restarting all workers with a new index", worker)
                    self._stop_all()  # a worker that opens the index alone drops it
                    for each in range(config.workers):
                        self._start(config, each)
                    break
                logger.error("worker %d ended (exit_code=%s): starting it again", worker, self._workers[worker].exitcode)
                self._start(config, worker)

    def _allow_restart(self) -> None:
        now_s = time.monotonic()
        while self._restarts and self._restarts[0] < now_s - _RESTART_WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= _MAX_RESTARTS:
            raise Unavailable("workers die repeatedly", restarts=_MAX_RESTARTS, window_s=_RESTART_WINDOW_S)
        self._restarts.append(now_s)

    def _start(self, config: MetadataConfig, worker: int) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(config, worker, theirs, self._set_up), name=f"metadata-{worker}")
        process.start()
        self._workers[worker] = process
        theirs.close()
        with ours:
            if not ours.poll(_START_TIMEOUT_S):
                raise Unavailable("a worker did not start in time", worker=worker, timeout_s=_START_TIMEOUT_S)
            try:
                _, self._metrics[worker] = ours.recv()
            except EOFError as error:
                raise Unavailable("a worker ended during its start: see its log", worker=worker) from error

    def _stop_all(self) -> None:
        for process in self._workers.values():
            process.terminate()
        deadline_s = time.monotonic() + self._config.stop_grace_ms / 1000 + _STOP_MARGIN_S
        for process in self._workers.values():
            process.join(max(0.0, deadline_s - time.monotonic()))
            if process.is_alive():
                logger.error("worker %s did not stop in time: killed", process.name)
                process.kill()
                process.join()


def _reserve_port(listen: str) -> socket.socket:
    """Reserve the port for the workers. The socket does not listen, so the kernel sends it no connections.

    Raises:
        Unavailable: the port cannot be bound.
    """
    host, _, port = listen.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as on_failure:
            reserved = on_failure.enter_context(socket.socket(family, kind))
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(address)
            on_failure.pop_all()
            return reserved
    except OSError as error:
        raise cannot_listen(listen, "metadata.listen", error) from error
