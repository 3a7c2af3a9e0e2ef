"""SGLang's own host pools, controller and radix tree on a machine without a GPU, for tests of its storage backends.

Its copies between device and host memory (both are host memory here) are replaced by index copies; everything between them and
the storage backend is SGLang's own code. Call ``sglang_kernels.install`` first.
"""

from __future__ import annotations

import atexit
import json
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self
from unittest import mock

from kvstore.lab import sglang_copies

WAIT_S = 30.0
_POLL_S = 0.005


def host_pool(
    layout: str, *, tokens: int, page: int, layers: int = 4, heads: int = 2, head_dim: int = 32, drafts: int = 0
) -> Any:  # noqa: ANN401
    """SGLang's host pool of a model with K and V, for twice ``tokens`` tokens, in one of its layouts; its memory is zero.

    ``drafts``: layers of a draft model in the same pool.
    """
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    sizes = [layers, *[1] * drafts]
    devices = [MHATokenToKVPool(tokens, page, torch.float32, heads, head_dim, size, "cpu", False) for size in sizes]
    model, *packed = [device.get_device_pool_infos()[0].buffer_info for device in devices]
    return MHATokenToKVPoolHost(
        model,
        2.0,
        0,
        page,
        layout,
        pin_memory=False,
        device_capacity_tokens=tokens,
        start_layer=0,
        end_layer=layers,
        draft_buffer_infos=packed,
    )


def mla_host_pool(layout: str, *, tokens: int, page: int, layers: int = 4) -> Any:  # noqa: ANN401
    """SGLang's host pool of a model with latent attention (MLA), as ``host_pool``."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device = MLATokenToKVPool(tokens, page, torch.float32, 32, 16, layers, "cpu", False)
    return MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        page,
        layout,
        pin_memory=False,
        device_capacity_tokens=tokens,
        start_layer=0,
        end_layer=layers,
        target_layer_num=layers,
    )


def storage_config(extra: Mapping[str, object], **fields: object) -> Any:  # noqa: ANN401
    """SGLang's ``HiCacheStorageConfig`` of one rank, unless fields say otherwise."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    alone: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": False,
        "model_name": "tiny",
        "extra_config": dict(extra),
    }
    return HiCacheStorageConfig(**{**alone, **fields})


class Tree:
    """SGLang's ``UnifiedRadixCache`` with HiCache and a storage backend; a context manager.

    Args:
        extra: ``--hicache-storage-backend-extra-config``.
        backend: ``--hicache-storage-backend``.
        layout: ``--hicache-mem-layout``.
        config: a ``CacheConfig`` of SGLang's test kit; None: a small model with full attention.
    """

    def __init__(
        self,
        extra: Mapping[str, object],
        *,
        backend: str = "dynamic",
        layout: str = "page_first",
        config: Any = None,  # noqa: ANN401
    ) -> None:
        import torch
        from sglang.test.kits.unified_radix_cache.config import CacheConfig
        from sglang.test.kits.unified_radix_cache.fixtures import build_fixture

        self.config = config or CacheConfig(page_size=16, num_layers=4, kv_size=512, dtype=torch.float32)
        self._stack = ExitStack()
        self._requests = 0
        try:
            for patch in _patches():
                self._stack.enter_context(patch)
            self.cache, self.allocator, self.requests = build_fixture(self.config)
            self._attach(extra, backend, layout)
        except BaseException:
            self._stack.close()
            raise

    def _attach(self, extra: Mapping[str, object], backend: str, layout: str) -> None:
        from sglang.srt.runtime_context import get_parallel
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        self._stack.enter_context(get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1))
        arguments = ServerArgs(
            model_path="dummy",
            page_size=self.config.page_size,
            hicache_io_backend="direct" if layout == "page_first_direct" else "kernel",
            hicache_mem_layout=layout,
            hicache_write_policy="write_through",
            hicache_storage_backend=backend,
            hicache_storage_backend_extra_config=json.dumps(dict(extra)),
            hicache_storage_prefetch_policy="wait_complete",
        )
        set_global_server_args_for_scheduler(arguments)
        cache = self.cache
        cache.init_hicache(arguments, cache.cache_init_params)
        atexit.unregister(cache.shutdown)
        self._stack.callback(cache.cache_controller.detach_storage_backend)
        cache.write_through_threshold = 1 << 30  # a test triggers backups
        cache.load_back_threshold = 0
        cache.cache_controller.prefetch_capacity_limit = cache.cache_controller.mem_pool_host.size

    @property
    def storage(self) -> Any:  # noqa: ANN401
        """The storage backend."""
        return self.cache.cache_controller.storage_backend

    @property
    def kv_pool(self) -> Any:  # noqa: ANN401
        """The device pool of the layers with full attention."""
        pool = self.allocator.get_kvcache()
        return getattr(pool, "full_kv_pool", pool)

    def insert(self, tokens: Sequence[int], fill: int) -> Any:  # noqa: ANN401
        """Put tokens, with random KV, into the tree. Return the node of the last token."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        indices = self._allocate(len(tokens))
        generator = torch.Generator().manual_seed(fill)
        for buffers in self._buffers():
            for buffer in buffers:
                buffer[indices] = torch.randn(buffer[indices].shape, generator=generator).to(buffer.dtype)
        parameters = InsertParams(key=RadixKey(array("q", tokens)), value=indices)
        if self.config.has_mamba:
            slot = self._request().kv.mamba_pool_idx.unsqueeze(0)
            for state in self._states():
                state[:, slot] = torch.randn(state[:, slot].shape, generator=generator).to(state.dtype)
            parameters.mamba_value = slot
        self.cache.insert(parameters)
        return self.match(tokens).last_device_node

    def _request(self) -> Any:  # noqa: ANN401
        """A request with a slot for its recurrent state."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        request = Req("made", "", array("q"), SamplingParams(temperature=0, max_new_tokens=1))
        self.requests.alloc([request])
        return request

    def _states(self) -> list[Any]:
        """The recurrent layers' states, ``[layers, slots, …]`` each."""
        cache = self.requests.mamba_pool.mamba_cache
        return [*cache.conv, cache.temporal]

    def _allocate(self, count: int) -> Any:  # noqa: ANN401
        if not self.config.has_swa:
            return self.allocator.alloc(count)
        full, window = self.allocator.full_attn_allocator.alloc(count), self.allocator.swa_attn_allocator.alloc(count)
        self.allocator.full_to_swa_index_mapping[full] = window
        return full

    def _buffers(self) -> list[Any]:
        pool = self.allocator.get_kvcache()
        pools = [pool.full_kv_pool, pool.swa_kv_pool] if self.config.has_swa else [self.kv_pool]
        return [buffers for one in pools for buffers in (one.k_buffer, one.v_buffer)]

    def match(self, tokens: Sequence[int]) -> Any:  # noqa: ANN401
        """Prefix of a prompt in the tree."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))

    def snapshot(self, node: Any) -> list[Any]:  # noqa: ANN401
        """State that a prompt up to a node needs: K and V of each layer, in windows those of the last tokens.

        Recurrent state at the node.
        """
        from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
        from sglang.test.kits.unified_radix_cache.fixtures import node_device_value

        indices = self.cache.path_device_indices(node)
        taken = [buffer[indices].clone() for buffers in (self.kv_pool.k_buffer, self.kv_pool.v_buffer) for buffer in buffers]
        if self.config.has_swa:
            window = self.allocator.full_to_swa_index_mapping[indices[-self.config.sliding_window_size :]]
            pool = self.allocator.get_kvcache().swa_kv_pool
            taken += [buffer[window].clone() for buffers in (pool.k_buffer, pool.v_buffer) for buffer in buffers]
        if self.config.has_mamba:
            slot = node_device_value(self.cache, node, ComponentType.MAMBA)
            taken += [state[:, slot].clone() for state in self._states()]
        return taken

    def back_up(self, node: Any) -> None:  # noqa: ANN401
        """Copy all pages up to a node to host memory and to storage, and wait until SGLang's threads are done."""
        from sglang.test.kits.unified_radix_cache.fixtures import node_parent, write_backup

        path: list[Any] = []
        root = self.cache.root_node_handle()
        while node != root:
            path.insert(0, node)
            node = node_parent(self.cache, node)
        for one in path:
            if not self.cache.tree_core.is_backuped(one):
                write_backup(self.cache, one, write_back=True)
        self.cache.writing_check(write_back=True)
        for one in path:
            self.cache.write_backup_storage(one)
        ends_s = time.monotonic() + WAIT_S
        while self.cache.ongoing_backup:
            assert time.monotonic() < ends_s, "backups to storage do not end"
            time.sleep(_POLL_S)
            self.cache.drain_storage_control_queues()

    def prefetch(self, tokens: Sequence[int]) -> int:
        """Load what storage has of a prompt, like SGLang before it admits a request. Return the tokens in host memory."""
        return self.prefetch_at_once([tokens])[0]

    def prefetch_at_once(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """The same for several prompts, under way at the same time."""
        requests = [self._begin_prefetch(tokens) for tokens in prompts]
        ends_s = time.monotonic() + WAIT_S
        while requests:
            assert time.monotonic() < ends_s, "the prefetches do not end"
            self.cache.check_hicache_events()
            requests = [request for request in requests if not self.cache.check_prefetch_progress(request)]
            time.sleep(_POLL_S if requests else 0)
        found = [self.match(tokens) for tokens in prompts]
        return [int(one.device_prefix_len + one.host_hit_length) for one in found]

    def _begin_prefetch(self, tokens: Sequence[int]) -> Any:  # noqa: ANN401
        """The handle of a request whose prefetch is under way."""
        from sglang.srt.managers.schedule_batch import CacheRequestHandle

        cache = self.cache
        self._requests += 1
        request = CacheRequestHandle(f"request {self._requests}", 0)
        matched = self.match(tokens)
        node = matched.last_host_node
        known = matched.device_prefix_len + matched.host_hit_length
        prefix = cache.get_prefix_hash_values(node) if cache.hicache_storage_pass_prefix_keys else None
        cache.prefetch_from_storage(
            request,
            node,
            array("q", tokens[known:]),
            cache.get_last_hash_value(node),
            prefix,
            matched_prefix_tokens=list(tokens[:known]),
        )
        return request

    def load_back(self, tokens: Sequence[int]) -> Any:  # noqa: ANN401
        """Copy what host memory has of a prompt to the device. Return the node of its last token."""
        node = self.match(tokens).last_host_node
        assert self.cache.load_back(node)
        assert self.cache.ready_to_load_host_cache() != -1
        for ack in list(self.cache.cache_controller.ack_load_queue):
            ack.finish_event.synchronize()
        self.cache.loading_check()
        return self.match(tokens).last_device_node

    def close(self) -> None:
        """Detaches the backend and puts SGLang's functions back."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _patches() -> list[Any]:
    """SGLang's functions that need a GPU or a model's configuration, replaced."""
    import sglang.test.kits.unified_radix_cache.fixtures as fixtures
    from sglang.srt.arg_groups import overrides

    return [
        mock.patch.object(fixtures, "get_device", return_value="cpu"),
        mock.patch.object(overrides, "mamba_cache_chunk_size", return_value=64),
        *sglang_copies.patches(),
    ]
