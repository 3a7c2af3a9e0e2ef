"""Chains of a workload's ids: dense chain ids for bounds and simulations, real block keys for the store."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from kvstore.core.errors import InvalidArgument
from kvstore.core.keys import KeyChain
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey
from kvstore.workload.requests import BlockIds

ChainIds = npt.NDArray[np.int64]

_SESSIONS_REMEMBERED = 4_096
_TOKEN_BITS = 32


class ChainTable:
    """Assigns each distinct prefix of ids a dense number, in order of first appearance.

    Ids of a trace name blocks; a cache stores a block *with its prefix*. Two requests share the chain ids of exactly their
    common prefix. A session's next request mostly repeats its last one: that part is compared, not looked up.
    """

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}
        self._sessions: OrderedDict[str, tuple[BlockIds, ChainIds]] = OrderedDict()

    def __len__(self) -> int:
        """Distinct prefixes seen."""
        return len(self._children)

    def intern(self, session: str, ids: BlockIds) -> ChainIds:
        """Return the chain ids of a request, one per id; new ones are the highest and come last."""
        chain = np.empty(len(ids), dtype=np.int64)
        at = self._repeated(session, ids, chain)
        node = int(chain[at - 1]) if at else -1
        for position, block in enumerate(ids[at:].tolist(), start=at):
            node = self._children.setdefault((node, block), len(self._children))
            chain[position] = node
        self._remember(session, ids, chain)
        return chain

    def _repeated(self, session: str, ids: BlockIds, chain: ChainIds) -> int:
        """Fill in the part that repeats the session's last request; returns its length."""
        last = self._sessions.get(session)
        if last is None:
            return 0
        last_ids, last_chain = last
        common = min(len(ids), len(last_ids))
        differs = ids[:common] != last_ids[:common]
        if differs.any():
            common = int(differs.argmax())
        chain[:common] = last_chain[:common]
        return common

    def _remember(self, session: str, ids: BlockIds, chain: ChainIds) -> None:
        self._sessions[session] = (ids, chain)
        self._sessions.move_to_end(session)
        if len(self._sessions) > _SESSIONS_REMEMBERED:
            self._sessions.popitem(last=False)


class BlockKeys:
    """Real block keys of a workload, each hashed once.

    An id determines the tokens of its block: its low and high 32 bits, then zeros. The store's hash chain gives equal prefixes
    of ids equal keys, and different prefixes different keys.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self._chain = KeyChain(spec)
        self._table = ChainTable()
        self._keys: list[BlockKey] = []

    def __len__(self) -> int:
        """Number of distinct keys."""
        return len(self._keys)

    def keys(self, session: str, ids: BlockIds) -> list[BlockKey]:
        """Return the keys of a request's blocks, from the head of its chain."""
        return self.keys_of(self.intern(session, ids))

    def intern(self, session: str, ids: BlockIds) -> ChainIds:
        """Chain ids of a request; derives its new keys. See ``ChainTable.intern``."""
        chain = self._table.intern(session, ids)
        known = int(np.searchsorted(chain >= len(self._keys), 1))  # new ones come last
        if known < len(chain):
            parent = self._keys[int(chain[known - 1])] if known else None
            self._keys += self._chain.keys(self._tokens(ids[known:]), parent=parent, first_block=known)
        return chain

    def keys_of(self, chain: ChainIds) -> list[BlockKey]:
        """Keys by chain id."""
        keys = self._keys
        return [keys[number] for number in chain.tolist()]

    def _tokens(self, ids: BlockIds) -> npt.NDArray[np.uint32]:
        width = self.spec.block_tokens
        if width == 1 and ids.size and int(ids.max()) >> _TOKEN_BITS:
            raise InvalidArgument("an id above 32 bits requires blocks of at least two tokens", id=int(ids.max()))
        tokens = np.zeros((len(ids), width), dtype=np.uint32)
        tokens[:, 0] = ids & 0xFFFF_FFFF
        if width > 1:
            tokens[:, 1] = ids >> _TOKEN_BITS
        return tokens.reshape(-1)
