"""vLLM's own tiered offloading on a CPU: its ``OffloadingConnector`` with a primary tier in host memory and its ``fs`` tier.

vLLM's worker for the primary tier copies with CUDA; this spec replaces it by one that copies with memory copies, in a thread, as
its transfers run beside the computation, too. Scheduling, tiers, files and promotion are vLLM's own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


def transfer_config(folder: Path, primary_bytes: int) -> dict[str, Any]:
    """The ``kv_transfer_config``: files under ``folder``, ``primary_bytes`` of host memory before them."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "peers.vllm_fs_tier",
            "cpu_bytes_to_use": primary_bytes,
            "secondary_tiers": [{"type": "fs", "root_dir": str(folder), "n_read_threads": 2, "n_write_threads": 2}],
        },
    }


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """The tiered spec with a worker for pages in host memory."""

    _host_worker: HostWorker | None = None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:  # noqa: ANN401  # vLLM's types
        """The one worker."""
        if self._host_worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._host_worker = HostWorker(kv_caches, region)
        return self._host_worker


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies pages between the engine's cache and the region, in one thread. A chunk is one block."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:  # noqa: ANN401
        self._pages = [one.tensor for one in kv_caches.tensors]
        self._chunks = [region.create_next_worker_view(one.page_size_bytes) for one in kv_caches.tensors]
        self._region = region
        self._jobs: queue.SimpleQueue[tuple[int, Sequence[Any], Sequence[int], Sequence[Any], Sequence[int]] | None]
        self._jobs = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._done: list[TransferResult] = []
        self._pending: set[int] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:  # noqa: ANN401
        """Engine to host memory."""
        return self._submit(job_id, self._pages, src_spec.block_ids, self._chunks, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:  # noqa: ANN401
        """Host memory to engine."""
        return self._submit(job_id, self._chunks, src_spec.block_ids, self._pages, dst_spec.block_ids)

    def _submit(self, job_id: int, sources: Sequence[Any], froms: Any, destinations: Sequence[Any], tos: Any) -> bool:  # noqa: ANN401
        if len(froms) != len(tos):
            raise ValueError("a chunk is one block here")
        with self._changed:
            self._pending.add(job_id)
        self._jobs.put((job_id, sources, list(map(int, froms)), destinations, list(map(int, tos))))
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job_id, sources, froms, destinations, tos = job
            start = time.perf_counter()
            size = 0
            with torch.inference_mode():
                for source, destination in zip(sources, destinations, strict=True):
                    for at, to in zip(froms, tos, strict=True):
                        row = source[at].view(torch.int8).reshape(-1)
                        destination[to].view(torch.int8).reshape(-1).copy_(row)
                        size += row.numel()
            with self._changed:
                self._pending.discard(job_id)
                self._done.append(TransferResult(job_id, True, size, time.perf_counter() - start))
                self._changed.notify_all()

    def get_finished(self) -> list[TransferResult]:
        """Transfers that have ended since the last call."""
        with self._changed:
            done, self._done = self._done, []
            return done

    def wait(self, job_ids: set[int]) -> None:
        """Waits for some transfers."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending & job_ids)

    def shutdown(self) -> None:
        """Ends the thread."""
        self._jobs.put(None)
        self._thread.join()
