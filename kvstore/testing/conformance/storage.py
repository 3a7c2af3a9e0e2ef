"""Storages of the connectors under test: a folder, a folder behind a server process, and this store."""

from __future__ import annotations

import os
import random
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

from kvstore.core.errors import Unavailable
from kvstore.embedded.children import start
from kvstore.embedded.ports import LOOPBACK, free_port
from kvstore.testing.conformance.faults import FOLDER_FAULTS, ConnectorFault, heal_folder, strike_folder
from kvstore.testing.connector.faulty_store import MIB, NODE, FaultyStore, StoreFault

STALL_S: Final = 3.0
"""How long a stopped server stays so."""
START_S: Final = 120.0
STORE_BYTES: Final = 64 * MIB
_POLL_S: Final = 0.1
_SUPERBLOCKS_BYTES: Final = MIB
"""Left as they are in this store's volume: a node does not start from damaged ones, and an operator repairs them."""
_ENGINE_FAULTS: Final = (ConnectorFault.NONE, ConnectorFault.ENGINE_KILLED, ConnectorFault.OTHER_WEIGHTS)


class Storage(AbstractContextManager["Storage"], Protocol):
    """Where a connector keeps KV."""

    faults: Sequence[ConnectorFault]
    """Faults that it can suffer."""

    def values(self) -> Mapping[str, str]:
        """Return what replaces ``{name}`` in the connector's configuration."""

    def strike(self, fault: ConnectorFault, dice: random.Random) -> None:
        """Let a fault happen now."""

    def heal(self) -> None:
        """Start what was killed. Damaged bytes stay."""

    def flush(self) -> None:
        """Wait until what the engine has handed over is on disk, if the storage can tell."""


class FolderStorage:
    """Files of a connector without servers.

    Args:
        folder: for files.
    """

    faults: Sequence[ConnectorFault] = (*_ENGINE_FAULTS, *FOLDER_FAULTS)

    def __init__(self, folder: Path) -> None:
        self._files = folder / "files"
        self._files.mkdir(parents=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        heal_folder(self._files)

    def values(self) -> Mapping[str, str]:
        """See ``Storage``."""
        return {"folder": str(self._files)}

    def strike(self, fault: ConnectorFault, dice: random.Random) -> None:
        """See ``Storage``."""
        strike_folder(self._files, fault, dice)

    def heal(self) -> None:
        """See ``Storage``."""
        heal_folder(self._files)

    def flush(self) -> None:
        """Files are written when the engine says so."""


class ServedFolder(FolderStorage):
    """Files of a connector behind a server process.

    Args:
        folder: for files.
        command: of the server, which listens at a TCP port; ``{folder}``, ``{host}`` and ``{port}`` are replaced.
    """

    faults = (*FolderStorage.faults, ConnectorFault.SERVER_KILLED, ConnectorFault.SERVER_STALLED)

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        super().__init__(folder)
        self._command = command
        self._log = folder / "server.log"
        self._port = free_port()
        self._server: subprocess.Popen[bytes] | None = None
        self._stalls: list[threading.Timer] = []

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end_stalls()
        self._kill()
        super().__exit__(kind, error, trace)

    def values(self) -> Mapping[str, str]:
        """See ``Storage``."""
        return {**super().values(), "host": LOOPBACK, "port": str(self._port)}

    def strike(self, fault: ConnectorFault, dice: random.Random) -> None:
        """See ``Storage``."""
        if fault is ConnectorFault.SERVER_KILLED:
            self._kill()
        elif fault is ConnectorFault.SERVER_STALLED:
            assert self._server is not None
            self._stalls.append(stop_for_a_while(self._server.pid))
        else:
            super().strike(fault, dice)

    def heal(self) -> None:
        """See ``Storage``."""
        self._end_stalls()
        super().heal()
        if self._server is None:
            self._start()

    def _start(self) -> None:
        command = [part.format(**self.values()) for part in self._command]
        with self._log.open("ab") as log:
            self._server = start(command, stdout=log, stderr=log, new_session=True)
        end_s = time.monotonic() + START_S
        while not _listens(self._port):
            if self._server.poll() is not None or time.monotonic() > end_s:
                raise Unavailable("the server of this connector did not start", command=shlex.join(command), log=self._log)
            time.sleep(_POLL_S)

    def _kill(self) -> None:
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            self._server = None

    def _end_stalls(self) -> None:
        for timer in self._stalls:
            timer.join()
        self._stalls.clear()


class StoreStorage:
    """This store: one metadata server, and one node with memory and disk.

    Args:
        folder: for data and logs.
    """

    faults: Sequence[ConnectorFault] = ServedFolder.faults

    def __init__(self, folder: Path) -> None:
        self._store = FaultyStore(folder, dram_bytes=STORE_BYTES, nvme_bytes=STORE_BYTES)
        self._values: dict[str, str] = {}
        self._stalls: list[threading.Timer] = []

    def __enter__(self) -> Self:
        self._store.__enter__()
        self._values = {"metadata": self._store.address.metadata, "node": self._store.address.node}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.heal()
        self._store.__exit__(kind, error, trace)

    def values(self) -> Mapping[str, str]:
        """See ``Storage``. The addresses hold over restarts."""
        return self._values

    def strike(self, fault: ConnectorFault, dice: random.Random) -> None:
        """See ``Storage``."""
        if fault is ConnectorFault.SERVER_KILLED:
            self._store.strike(StoreFault.ALL_KILLED, dice)
        elif fault is ConnectorFault.SERVER_STALLED:
            self._stalls.append(stop_for_a_while(self._store.cluster.node(NODE).process.pid))
        else:
            strike_folder(self._store.cluster.volume_path(NODE), fault, dice, skip_bytes=_SUPERBLOCKS_BYTES)

    def heal(self) -> None:
        """See ``Storage``."""
        for timer in self._stalls:
            timer.join()
        self._stalls.clear()
        heal_folder(self._store.cluster.volume_path(NODE))
        self._store.heal()

    def flush(self) -> None:
        """Wait until all blocks are on disk, and evict them from memory: faults of the disk should show."""
        self._store.flush()
        self._store.evict_memory()


def stop_for_a_while(pid: int) -> threading.Timer:
    """Stop a process, and let it go on after ``STALL_S``. Join the timer before the process is ended."""
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(STALL_S, os.kill, (pid, signal.SIGCONT))
    timer.start()
    return timer


def _listens(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=_POLL_S).close()
    except OSError:
        return False
    return True
