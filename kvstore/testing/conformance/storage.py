"""Storages of the connectors under test: a folder, and this store. A server of the connector may be in front of both."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

from kvstore.testing.conformance.faults import ConnectorFault, heal_folder, strike_folder
from kvstore.testing.conformance.server import ServerProcess, stop_for_a_while
from kvstore.testing.connector.faulty_store import MIB, NODE, FaultyStore, StoreFault

STORE_BYTES: Final = 64 * MIB
_SUPERBLOCKS_BYTES: Final = MIB
"""Left as they are in this store's volume: a node does not start from damaged ones, and an operator repairs them."""
_SETTLED_S: Final = 1.0
"""A server that writes nothing for this long has written everything."""
_MOST_SETTLING_S: Final = 20.0
ENGINE_FAULTS: Final = (ConnectorFault.NONE, ConnectorFault.ENGINE_KILLED, ConnectorFault.OTHER_WEIGHTS)
SERVER_FAULTS: Final = (ConnectorFault.SERVER_KILLED, ConnectorFault.SERVER_STALLED)


class Storage(AbstractContextManager["Storage"], Protocol):
    """Storage of a connector."""

    def values(self) -> Mapping[str, str]:
        """Return the values of the names in the connector's configuration."""

    def strike(self, fault: ConnectorFault, dice: random.Random) -> None:
        """Let a fault happen now."""

    def heal(self) -> None:
        """Start what was killed. Damaged bytes stay."""

    def check(self) -> None:
        """Check that servers still run.

        Raises:
            Unavailable: one has exited.
        """

    def settle(self) -> None:
        """Wait until everything is on disk, and empty the memory of servers, so that loads read disks."""


class FolderStorage:
    """Files of a connector.

    Args:
        folder: for files and logs.
        command: of its server; empty: it has none.
    """

    def __init__(self, folder: Path, command: Sequence[str] = ()) -> None:
        self._files = folder / "files"
        self._files.mkdir(parents=True)
        self._server = ServerProcess(command, folder / "server.log")

    def __enter__(self) -> Self:
        self._server.start(self.values())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.end()
        heal_folder(self._files)

    def values(self) -> Mapping[str, str]:
        """See ``Storage``."""
        return {"folder": str(self._files), **self._server.values}

    def strike(self, fault: ConnectorFault, dice: random.Random) -> None:
        """See ``Storage``."""
        if fault is ConnectorFault.SERVER_KILLED:
            self._server.kill()
        elif fault is ConnectorFault.SERVER_STALLED:
            self._server.stall()
        else:
            strike_folder(self._files, fault, dice)

    def heal(self) -> None:
        """See ``Storage``."""
        self._server.end_stalls()
        heal_folder(self._files)
        self._server.start(self.values())

    def check(self) -> None:
        """See ``Storage``."""
        self._server.check()

    def settle(self) -> None:
        """See ``Storage``."""
        if not self._server.values:
            return
        end_s = time.monotonic() + _MOST_SETTLING_S
        before: object = None
        while before != (before := self._sizes()) and time.monotonic() < end_s:
            time.sleep(_SETTLED_S)
        self._server.end()
        self._server.start(self.values())

    def _sizes(self) -> list[int]:
        sizes = []
        for path in self._files.rglob("*"):
            with suppress(FileNotFoundError):  # a temporary file was renamed
                sizes.append(path.stat().st_size)
        return sizes


class StoreStorage:
    """This store: one metadata server, and one node with memory and disk.

    Args:
        folder: for data and logs.
        command: of a server of the connector; empty: it has none.
    """

    def __init__(self, folder: Path, command: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True)
        self._store = FaultyStore(folder / "store", dram_bytes=STORE_BYTES, nvme_bytes=STORE_BYTES)
        self._server = ServerProcess(command, folder / "server.log")
        self._addresses: dict[str, str] = {}
        self._stalls: list[threading.Timer] = []

    def __enter__(self) -> Self:
        with ExitStack() as started:
            started.enter_context(self._store)
            self._addresses = {"metadata": self._store.address.metadata, "node": self._store.address.node}
            self._server.start(self._addresses)
            started.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.end()
        self._heal_store()
        self._store.__exit__(kind, error, trace)

    def values(self) -> Mapping[str, str]:
        """See ``Storage``. The addresses hold over restarts."""
        return {**self._addresses, **self._server.values}

    def strike(self, fault: ConnectorFault, dice: random.Random) -> None:
        """See ``Storage``. A fault of servers strikes all of them."""
        if fault is ConnectorFault.SERVER_KILLED:
            self._server.kill()
            self._store.strike(StoreFault.ALL_KILLED, dice)
        elif fault is ConnectorFault.SERVER_STALLED:
            self._server.stall()
            self._stalls.append(stop_for_a_while(self._store.cluster.node(NODE).process.pid))
        else:
            strike_folder(self._store.cluster.volume_path(NODE), fault, dice, skip_bytes=_SUPERBLOCKS_BYTES)

    def heal(self) -> None:
        """See ``Storage``."""
        self._heal_store()
        self._server.start(self._addresses)

    def check(self) -> None:
        """See ``Storage``."""
        self._server.check()

    def _heal_store(self) -> None:
        for timer in self._stalls:
            timer.join()
        self._stalls.clear()
        heal_folder(self._store.cluster.volume_path(NODE))
        self._store.heal()

    def settle(self) -> None:
        """See ``Storage``."""
        if self._server.values:
            time.sleep(_SETTLED_S)
            self._server.end()
            self._server.start(self._addresses)
        self._store.flush()
        self._store.evict_memory()
