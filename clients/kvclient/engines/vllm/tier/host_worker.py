"""vLLM's host memory on a machine without a device: pages are copied by the native kernel, in one thread.

vLLM's own worker copies with a device's streams. The layout of a chunk is the same: for each tensor, the pages of its blocks. In
the canonical layout, the ranks share the pages of a chunk, and each rank copies its heads.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvclient import InvalidArgument
from kvclient.engines.vllm.tier.canonical import PageCopy, block_bytes
from kvstore.core.errors import DeadlineExceeded
from kvstore.native import CopyBatch, run

_log = logging.getLogger(__name__)
WAIT_S = 60.0
"""Limit of a wait for copies in memory. They take milliseconds, so a copy that takes longer hangs."""
_Ids = npt.NDArray[np.int64]


class HostTieringSpec(TieringOffloadingSpec):
    """vLLM's tiered offloading for pages in host memory."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        """Create the specification; see vLLM's."""
        super().__init__(config)
        self._host_worker: HostWorker | None = None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:  # noqa: ANN401
        """Return the worker of this process.

        Raises:
            RuntimeError: the canonical layout was requested, and vLLM cannot certify that of a layer.
        """
        if self._host_worker is None:
            if self.config.canonical_layout:
                self._validate_canonical_refs(kv_caches)
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._host_worker = HostWorker(kv_caches, region, self.blocks_per_chunk, canonical=self.config.canonical_layout)
        return self._host_worker


class HostWorker(OffloadingWorker):
    """Copies pages between the engine's cache and host memory.

    Args:
        kv_caches: vLLM's canonical KV caches.
        region: vLLM's host memory.
        blocks_per_chunk: blocks of a chunk.
        canonical: chunks have vLLM's canonical layout, which all ranks share.
    """

    def __init__(self, kv_caches: Any, region: Any, blocks_per_chunk: int, *, canonical: bool = False) -> None:  # noqa: ANN401
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._pages = [one.tensor for one in kv_caches.tensors]
        if canonical:
            self._block_bytes = block_bytes(kv_caches.group_data_refs, len(self._pages))
            self._chunks = [region.create_next_canonical_view(size * blocks_per_chunk) for size in self._block_bytes]
        else:
            self._block_bytes = [int(one.page_size_bytes) for one in kv_caches.tensors]
            self._chunks = [region.create_next_worker_view(size * blocks_per_chunk) for size in self._block_bytes]
        """By tensor: bytes of a block in a chunk, and the chunks."""
        self._copies = [[PageCopy.of(ref, canonical=canonical) for ref in refs] for refs in kv_caches.group_data_refs]
        """By group."""
        self._jobs: queue.SimpleQueue[tuple[int, bool, Any, Any] | None] = queue.SimpleQueue()
        """Not bounded here: jobs do not share chunks, which bounds their number."""
        self._changed = threading.Condition()
        self._done: list[TransferResult] = []
        self._pending: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="kvstore-host-copies", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:  # noqa: ANN401
        """Copy pages to host memory."""
        return self._submit(job_id, True, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:  # noqa: ANN401
        """Copy host memory to pages."""
        return self._submit(job_id, False, dst_spec, src_spec)

    def _submit(self, job_id: int, stores: bool, pages: Any, chunks: Any) -> bool:  # noqa: ANN401
        with self._changed:
            self._pending.add(job_id)
        self._jobs.put((job_id, stores, pages, chunks))
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job_id, stores, pages, chunks = job
            began_s, size, done = time.perf_counter(), 0, False
            try:
                size = self._copy(stores, pages, chunks)
                done = True
            except Exception:  # noqa: BLE001  # a bug: vLLM ends the engine, which would otherwise hang
                _log.exception("copy between pages and host memory failed (job=%d)", job_id)
            with self._changed:
                self._pending.discard(job_id)
                self._done.append(TransferResult(job_id, done, size, time.perf_counter() - began_s))
                self._changed.notify_all()

    def _copy(self, stores: bool, pages: Any, chunks: Any) -> int:  # noqa: ANN401
        """Copy the blocks of one job, and return the bytes."""
        per_chunk, size, first_block, first_chunk = self._blocks_per_chunk, 0, 0, 0
        block_ids, chunk_ids = pages.block_ids.astype(np.int64), chunks.block_ids.astype(np.int64)
        for copies, count, index in zip(self._copies, pages.group_sizes, pages.block_indices, strict=True):
            if not count:
                continue
            slots = int(index) % per_chunk + np.arange(count)
            blocks = block_ids[first_block : first_block + count]
            targets = chunk_ids[first_chunk + slots // per_chunk]
            first_block += count
            first_chunk += int(slots[-1]) // per_chunk + 1
            for copy in copies:
                own = slice(None)
                if stores and copy.writers > 1:  # other ranks hold the same bytes, and store the other blocks
                    own = (targets * per_chunk + slots % per_chunk) % copy.writers == copy.writer
                size += self._copy_pages(stores, copy, blocks[own], targets[own], slots[own] % per_chunk)
        if first_block != len(block_ids) or first_chunk != len(chunk_ids):
            raise InvalidArgument("blocks and chunks of a job do not match", blocks=len(block_ids), chunks=len(chunk_ids))
        return size

    def _copy_pages(self, stores: bool, copy: PageCopy, blocks: _Ids, chunks: _Ids, slots: _Ids) -> int:
        """Copy pages of one layer, and return the bytes.

        Args:
            stores: whether pages are copied to chunks, and not the other way.
            copy: which bytes are copied.
            blocks: ids of the pages.
            chunks: by page: id of its chunk.
            slots: by page: its position in the chunk.
        """
        page, chunk = self._pages[copy.tensor], self._chunks[copy.tensor]
        page_rows = _rows(page, blocks)
        chunk_rows = _rows(chunk, chunks) + (slots * self._block_bytes[copy.tensor]).astype(np.uint64)
        moved = 0
        for page_offsets, chunk_offsets, size in copy.pieces if len(blocks) else ():
            in_pages = np.add.outer(page_rows, page_offsets).reshape(-1)
            in_chunks = np.add.outer(chunk_rows, chunk_offsets).reshape(-1)
            sources, destinations = (in_pages, in_chunks) if stores else (in_chunks, in_pages)
            bounds = (_bounds(page), _bounds(chunk)) if stores else (_bounds(chunk), _bounds(page))
            run(CopyBatch(sources, destinations, *bounds, size=size))
            moved += size * len(in_pages)
        return moved

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that have ended since the last call."""
        with self._changed:
            done, self._done = self._done, []
            return done

    def wait(self, job_ids: set[int]) -> None:
        """Wait for some transfers, because vLLM is about to use their pages.

        Raises:
            DeadlineExceeded: a copy hangs. vLLM ends the engine, since its pages cannot be used.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._pending & job_ids, WAIT_S):
                hung = sorted(self._pending & job_ids)
                raise DeadlineExceeded("copies between pages and host memory have not ended", jobs=hung, seconds=WAIT_S)

    def shutdown(self) -> None:
        """End the thread and release host memory. If a copy hangs, the memory stays mapped."""
        self._jobs.put(None)
        self._thread.join(WAIT_S)
        if self._thread.is_alive():
            _log.error("host memory not released: a copy has not ended (seconds=%g)", WAIT_S)
            return
        self._chunks.clear()
        self._region.cleanup()


def _rows(tensor: torch.Tensor, ids: Sequence[int] | _Ids) -> npt.NDArray[np.uint64]:
    """Return the addresses of rows."""
    step = tensor.stride(0) * tensor.element_size()
    return (np.asarray(ids, np.int64) * step + tensor.data_ptr()).astype(np.uint64)


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a tensor and of the one after its last."""
    start = tensor.data_ptr()
    return start, start + ((tensor.shape[0] - 1) * tensor.stride(0) + tensor.shape[1]) * tensor.element_size()
