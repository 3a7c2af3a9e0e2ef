"""Settings of a stress run, and the chains of blocks that follow from them. Nothing is kept per block."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, Self

import numpy as np

from kvclient.options import ClientOptions
from kvstore.core.errors import InvalidArgument
from kvstore.core.keys import KeyChain
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey
from kvstore.process.tls import TlsConfig

MOST_REQUEST_BYTES: Final = 256 << 20
"""Largest request: each client has a buffer of this size, and another one for the limit."""
_BLOCK_TOKENS: Final = 16
_NEW: Final = 1 << 31
"""Marks the tokens of blocks that the cold pass does not store."""
_DEADLINE_S: Final = 30.0
_MOST_DIGITS: Final = 6
"""Of a weight in a mix."""


class OperationKind(StrEnum):
    """Operations of a warm pass. A load includes its lookup, as in engines."""

    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class OperationMix:
    """Weights of the operations of a warm pass.

    Raises:
        InvalidArgument: no weight is above 0, or one is negative.
    """

    lookup: int = 0
    load: int = 0
    store: int = 0

    def __post_init__(self) -> None:
        if min(astuple(self)) < 0 or not any(astuple(self)):
            raise InvalidArgument("the weights of a mix must not be negative, and one must be above 0", mix=str(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``LOOKUP:LOAD:STORE``, such as ``1:8:1``.

        Raises:
            InvalidArgument: the text is not three whole numbers.
        """
        parts = text.split(":")
        if len(parts) != len(OperationKind) or not all(
            part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS for part in parts
        ):
            raise InvalidArgument("a mix is three numbers of at most 6 digits, LOOKUP:LOAD:STORE, such as 1:8:1", mix=text[:40])
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return ":".join(map(str, astuple(self)))

    def kinds(self, seed: int) -> Iterator[OperationKind]:
        """Draw operations without end."""
        draw = random.Random(seed)  # noqa: S311  # which operation is next is no secret
        while True:
            yield draw.choices(list(OperationKind), astuple(self))[0]


LOADS_ONLY: Final = OperationMix(load=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StressPlan:
    """Settings of one run. Sent to the client processes.

    Attributes:
        metadata: address of the metadata server.
        node: local node, as for ``KVClient.connect``.
        tls: TLS of all connections.
        token_file: file with the token.
        tenant: tenant of the namespace.
        host: part of the namespace's name, so that runs on several hosts do not remove each other's blocks.
        run: number of the run: makes its blocks unlike those of earlier runs.
        clients: client processes.
        sessions: sessions of each client process; each has its own thread, connection and requests.
        block_bytes: size of a block.
        layers: layers of a block.
        request_blocks: blocks per request.
        requests: requests per session in the cold pass.
        hit_share: share of the blocks of a warm request that the cold pass stored.
        duration_s: length of the warm pass; None: as many operations as there are stored requests.
        mix: operations of the warm pass.
        rate: operations per second of the warm pass, all sessions together. An operation begins at its time or when the session
            has ended the one before, and its latency counts from its time, without the making and checking of bytes. None: one
            after the other.
        deadline_s: limit per call.

    Raises:
        InvalidArgument: the request does not fit into the limit, or a block does not divide into layers.
    """

    metadata: str
    node: str | None
    tls: TlsConfig | None
    token_file: Path | None
    tenant: str
    host: str
    run: int
    clients: int
    block_bytes: int
    layers: int
    request_blocks: int
    requests: int
    sessions: int = 1
    hit_share: float = 1.0
    duration_s: float | None = None
    mix: OperationMix = LOADS_ONLY
    rate: float | None = None
    deadline_s: float = _DEADLINE_S

    def __post_init__(self) -> None:
        if self.block_bytes % self.layers:
            raise InvalidArgument("the block size must be a multiple of the layers", block=self.block_bytes, layers=self.layers)
        if self.request_bytes > MOST_REQUEST_BYTES:
            raise InvalidArgument("a request is too large", bytes=self.request_bytes, at_most=MOST_REQUEST_BYTES)

    @property
    def request_bytes(self) -> int:
        """Bytes of one request."""
        return self.block_bytes * self.request_blocks

    @property
    def stored_bytes(self) -> int:
        """Bytes that the cold pass stores."""
        return self.request_bytes * self.requests * self.all_sessions

    @property
    def all_sessions(self) -> int:
        """Sessions of all clients."""
        return self.clients * self.sessions

    @property
    def hit_blocks(self) -> int:
        """Blocks of a warm request that are stored."""
        return round(self.request_blocks * self.hit_share)

    def spec(self) -> CacheSpec:
        """The namespace of this host's runs."""
        return CacheSpec(
            model=f"kvstore-stress-{self.host}",
            block_tokens=_BLOCK_TOKENS,
            layers=self.layers,
            layer_block_bytes=self.block_bytes // self.layers,
            dtype="uint8",
            layout="payload-of-key",
            tenant=self.tenant,
        )

    def due_s(self, session: int, operation: int) -> float:
        """Return when an operation of the warm pass is to begin, in seconds after the start; 0 without a rate."""
        return (operation * self.all_sessions + session) / self.rate if self.rate else 0.0

    def options(self, number: int) -> ClientOptions:
        """Options of one session."""
        return ClientOptions(
            client_name=f"stress-{number}",
            default_deadline_s=self.deadline_s,
            lookup_deadline_s=self.deadline_s,
            token_file=self.token_file,
        )


class StressChains:
    """Keys of requests, derived from numbers: equal numbers give equal keys in every process."""

    def __init__(self, plan: StressPlan) -> None:
        self._plan = plan
        self._chain = KeyChain(plan.spec())

    def stored(self, session: int, request: int) -> list[BlockKey]:
        """Keys of a request of the cold pass."""
        return self._keys(session, request, self._plan.request_blocks, new_from=self._plan.request_blocks)

    def warm(self, session: int, request: int, turn: int) -> list[BlockKey]:
        """Keys of a request of the warm pass: the leading blocks are stored, the others are new in each turn."""
        return self._keys(session, request, self._plan.request_blocks, new_from=self._plan.hit_blocks, turn=turn)

    def fresh(self, session: int, number: int) -> list[BlockKey]:
        """Keys of a request that a warm pass stores: all blocks are new."""
        return self._keys(session, self._plan.requests + number, self._plan.request_blocks, new_from=0)

    def _keys(self, session: int, request: int, blocks: int, *, new_from: int, turn: int = 0) -> list[BlockKey]:
        tokens = np.zeros((blocks, _BLOCK_TOKENS), np.uint32)
        tokens[:, 0] = self._plan.run & 0xFFFF_FFFF
        tokens[:, 1] = self._plan.run >> 32
        tokens[:, 2] = session
        tokens[:, 3] = request
        tokens[:, 4] = np.arange(blocks)
        tokens[new_from:, 5] = _NEW | (turn & (_NEW - 1))
        return list(self._chain.keys(tokens.reshape(-1)))
