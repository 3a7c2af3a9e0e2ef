"""A client in a process of its own, so that it may use another kernel for copies and checksums than this process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Literal, Self

import numpy as np

from kvclient import KVClient
from kvstore.core.types import Tier
from kvstore.native import kernel_name
from rig import OPTIONS, Chains, found, loaded, spec, stored

Command = Literal["fill", "load", "check", "end"]
_END_S = 10.0


class LoadChild:
    """A client that has stored blocks and loads them on command; a context manager that ends it.

    Args:
        metadata: address of the metadata server.
        node: socket of the local node; None: loads over TCP.
        block_bytes: size of a block.
        layers: layers of a block.
        blocks: blocks per load.
        seed: seed of the blocks.
    """

    def __init__(self, metadata: str, node: str | None, block_bytes: int, layers: int, blocks: int, seed: int) -> None:
        context = multiprocessing.get_context("spawn")  # a new import chooses the kernel
        self._pipe, theirs = context.Pipe()
        settings = (metadata, node, block_bytes, layers, blocks, seed)
        self._process = context.Process(target=_serve, args=(theirs, *settings), daemon=True)
        self._process.start()
        theirs.close()
        self.kernel = str(self._pipe.recv())

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, command: Command) -> None:
        """Send a command and wait for its end."""
        self._pipe.send(command)
        self._pipe.recv()

    def close(self) -> None:
        """End the process."""
        self._pipe.send("end")
        self._process.join(_END_S)
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def kernel_of_children(name: str) -> Iterator[None]:
    """Processes that start in this context use the named kernel; an empty name: the fastest."""
    before = os.environ.get("KVSTORE_NATIVE")
    os.environ["KVSTORE_NATIVE"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["KVSTORE_NATIVE"]
        else:
            os.environ["KVSTORE_NATIVE"] = before


def _serve(pipe: Connection, metadata: str, node: str | None, block_bytes: int, layers: int, blocks: int, seed: int) -> None:
    cache = spec(block_bytes, layers)
    chains = Chains(cache, blocks, seed)
    buffer = np.zeros((blocks, block_bytes), np.uint8)
    with KVClient.connect(metadata, cache, node=node, options=OPTIONS) as client:
        chain = chains.next()
        stored(client.store(chain.keys, chain.payload))
        lookup = found(client, chain.keys)
        pipe.send(kernel_name())
        while (command := pipe.recv()) != "end":
            if command == "fill":
                buffer.fill(0)
            elif command == "load":
                loaded(client.load(lookup, buffer, verify="always"), Tier.DRAM)
            else:
                chains.check(chain, buffer)
            pipe.send(None)
