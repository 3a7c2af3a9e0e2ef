"""Chunks of one KV cache group in the store: lookups, loads and stores. All calls wait; they run in threads of the tier."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from kvclient import CacheSpec, HeadLookup, KVClient, KVStoreError, Lookup, Outcome, Paths
from kvclient.call.request_hint import RequestHint
from kvclient.results import HELD
from kvstore.core.types import KEY_BYTES, BlockKey

Row = npt.NDArray[np.uint8]
GROUP_BYTES = 4
"""Bytes of vLLM's keys after the hash: the group."""
_SHORTEST_S = 0.001
"""Deadline of a load whose time has passed: it ends at once, with every block missing."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a job.

    Attributes:
        key: vLLM's key.
        block_hash: vLLM's hash of its tokens and all before.
        position: in the chain of its group; None: it is the head of a separate chain.
        row: its bytes in host memory.
    """

    key: bytes
    block_hash: bytes
    position: int | None
    row: Row


class ChunkStore:
    """The store in the namespace of one group.

    Args:
        client: connected in that namespace.
    """

    def __init__(self, client: KVClient) -> None:
        self._client = client
        self._bytes = client.spec.layer_block_bytes  # the end of a row may be unused
        self._mask = np.frombuffer(client.spec.namespace, np.uint64)

    def keys(self, hashes: Sequence[bytes]) -> list[BlockKey]:
        """Return the store's keys: the end of each hash, different in each namespace."""
        ends = np.frombuffer(b"".join(block_hash[-KEY_BYTES:] for block_hash in hashes), np.uint64).reshape(-1, 2)
        packed = (ends ^ self._mask).tobytes()
        return [BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES)]

    @property
    def spec(self) -> CacheSpec:
        """The namespace."""
        return self._client.spec

    @property
    def is_connected(self) -> bool:
        """Whether the session with this host's node is open, or a metadata server is in use."""
        return bool(self._client.stats()["client_session_open"]) or any(one.used for one in self._client.metadata_servers)

    def give_hint(self, hint: RequestHint, hashes: Sequence[bytes]) -> None:
        """Give a hint about the session of a chain. Does not wait.

        Raises:
            InvalidArgument: too many hashes.
        """
        self._client.hints.give(hint, self.keys(hashes))

    # ---- lookups ----
    def find_chain(self, hashes: Sequence[bytes]) -> Lookup:
        """Look up a chain from its head."""
        return self._client.lookup(self.keys(hashes))

    def find(
        self, positions: Mapping[bytes, int | None], chain: Sequence[bytes]
    ) -> tuple[dict[bytes, bool], Lookup | None, KVStoreError | None]:
        """Look up chunks of one request, with one call for its chain and one for its heads.

        Args:
            positions: by key: its position in the chain; None: the head of a separate chain.
            chain: hashes of the request's leading chunks.

        Returns:
            Whether each chunk is held, the lookup of the chain, if there was one, and the failure of the store, if there was one.
        """
        held = dict.fromkeys(positions, False)
        found: Lookup | None = None
        error: KVStoreError | None = None
        if chain:
            found = self.find_chain(chain)
            error = found.error
            held.update({key: at < found.hit_blocks for key, at in positions.items() if at is not None})
        heads = [key for key, at in positions.items() if at is None]
        if heads:
            answer = self._client.lookup_heads(self.keys([key[:-GROUP_BYTES] for key in heads]))
            error = error or answer.error
            held.update(zip(heads, answer.held.tolist(), strict=True))
        return held, found, error

    # ---- loads ----
    def load(
        self, chunks: Sequence[Chunk], chain: Sequence[bytes], found: Lookup | None, end_s: float, paths: Paths | None = None
    ) -> tuple[list[bytes], Counter[str], str]:
        """Load chunks into their rows. When this returns, nothing writes to them any more.

        Args:
            chunks: what to load, in any order.
            chain: hashes of the request's chain, for chunks with a position.
            found: an earlier lookup of this chain, if there was one.
            end_s: monotonic time at which the load ends, even if chunks are missing.
            paths: hosts whose storage links may be used; None: as the options say.

        Returns:
            vLLM's keys of the chunks that arrived, their bytes by path (see ``LoadResult``), and why chunks are missing.
        """
        arrived: list[bytes] = []
        why = ""
        sizes: Counter[str] = Counter()
        for run, keys, rows, left_s in self._runs_in_time(chunks, end_s):
            start = run[0].position
            if start is None:
                heads = self._client.lookup_heads(keys, deadline_s=left_s)
                what: Lookup | HeadLookup = heads
                failed = heads.error
            else:
                stop = start + len(run)
                if found is None or found.hit_blocks < stop or list(found.keys[start:stop]) != keys:
                    found = self._client.lookup(self.keys(chain[:stop]), deadline_s=left_s)
                part = found.part(start, stop)
                if list(part.keys) != keys:
                    why = "chunks of another prompt"
                    continue
                what = Lookup(part.keys, len(part.keys), part.runs, part.parent, part.depth)
                failed = found.error
            left_s = max(_SHORTEST_S, end_s - time.monotonic())  # a slow lookup leaves less
            result = self._client.load(what, rows, deadline_s=left_s, paths=paths)
            hits = result.outcomes == Outcome.HIT
            arrived += [chunk.key for chunk, hit in zip(run, hits.tolist(), strict=True) if hit]
            sizes.update(result.bytes_by_path)
            if missing := result.shortfall:
                why = f"{missing}, lookup failed: {failed}" if failed is not None else missing
        return arrived, sizes, why

    # ---- stores ----
    def store(self, chunks: Sequence[Chunk], chain: Sequence[bytes], end_s: float) -> tuple[list[bytes], int, str]:
        """Store chunks; arguments as for ``load``.

        Returns:
            vLLM's keys of the chunks that the store holds now, the bytes that were stored, and why chunks are missing.
        """
        held: list[bytes] = []
        why = ""
        size = 0
        for run, keys, rows, left_s in self._runs_in_time(chunks, end_s):
            start = run[0].position
            if start is None:
                result = self._client.store_heads(keys, rows, deadline_s=left_s)
            else:
                parent = self.keys([chain[start - 1]])[0] if start else None
                result = self._client.store(keys, rows, parent=parent, depth=start, deadline_s=left_s)
            held += [chunk.key for chunk, one in zip(run, HELD[result.outcomes].tolist(), strict=True) if one]
            size += result.bytes_stored
            why = result.shortfall or why
        return held, size, why

    def _runs_in_time(
        self, chunks: Sequence[Chunk], end_s: float
    ) -> Iterator[tuple[list[Chunk], list[BlockKey], list[Row], float]]:
        """Yield runs with their keys, rows and the seconds left, until no time is left."""
        for run in runs_of(chunks):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            yield run, self.keys([chunk.block_hash for chunk in run]), [chunk.row[: self._bytes] for chunk in run], left_s

    def close(self) -> None:
        """Close the client."""
        self._client.close()


def runs_of(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Cut chunks into heads, and runs of consecutive positions."""
    heads = [chunk for chunk in chunks if chunk.position is None]
    runs = [heads] if heads else []
    last = -1
    placed = [(chunk.position, chunk) for chunk in chunks if chunk.position is not None]
    for position, chunk in sorted(placed, key=itemgetter(0)):
        if runs and last >= 0 and position == last + 1:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
        last = position
    return runs


def hide_split_chunks(pages: list[int], first: int, per_chunk: int) -> int:
    """Have vLLM's scheduler skip chunks whose pages it would store in the wrong places, and return how many.

    vLLM writes the pages of a group in a job one after another, from the place of the first. So only the first chunk of a job may
    lack pages, at its start: those that a window has passed. A chunk is skipped if its last page is the null page.

    Args:
        pages: of a request, in the order of its tokens; changed in place. 0: the null page, or one that was given away.
        first: the first chunk that a job may store.
        per_chunk: pages of a chunk.
    """
    hidden, follows = 0, False
    for start in range(first * per_chunk, len(pages) - per_chunk + 1, per_chunk):
        chunk = pages[start : start + per_chunk]
        if not chunk[-1]:
            continue
        passed = next(at for at, page in enumerate(chunk) if page)
        if 0 in chunk[passed:] or (passed and follows):
            pages[start + per_chunk - 1] = 0
            hidden += 1
        else:
            follows = True
    return hidden
