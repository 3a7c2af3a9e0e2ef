"""HiCache's copies between device and host pools by torch, for SGLang on a CPU, where both pools are host memory.

SGLang 0.5.23 has only GPU kernels for these copies, and pins host pools with CUDA. SGLang's own code still decides what is copied
and when. Call ``sglang_kernels.install`` first.
"""

from __future__ import annotations

from typing import Any
from unittest import mock


def patches() -> list[Any]:
    """SGLang's functions of host pools that need a GPU, replaced: ``unittest.mock`` patches that the caller starts."""
    from sglang.srt.mem_cache.pool_host import base, common
    from sglang.srt.mem_cache.pool_host.base import HostKVCache
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    return [
        mock.patch.object(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0),  # 10 GiB of free memory is much for a test
        mock.patch.object(common, "_cuda_host_register", return_value=None),
        mock.patch.object(HostKVCache, "__init__", _unpinned(HostKVCache.__init__)),
        mock.patch.object(MambaPoolHost, "__init__", _unpinned(MambaPoolHost.__init__)),
        mock.patch.object(MHATokenToKVPoolHost, "backup_from_device_all_layer", _to_host),
        mock.patch.object(MHATokenToKVPoolHost, "load_to_device_per_layer", _to_device),
        mock.patch.object(MambaPoolHost, "_copy_tensor_all_layers_lf_pf", staticmethod(_states_to_host)),
        mock.patch.object(MambaPoolHost, "_copy_tensor_pf_lf", staticmethod(_state_to_device)),
    ]


def _unpinned(make: Any) -> Any:  # noqa: ANN401
    """A constructor of a host pool, with memory that no GPU knows of."""

    def made(pool: Any, *arguments: object, **options: object) -> None:  # noqa: ANN401
        make(pool, *arguments, **{**options, "pin_memory": False})

    return made


def _states_to_host(src_layers: Any, dst: Any, src_indices: Any, dst_indices: Any, num_layers: int, *_: Any, **__: Any) -> None:  # noqa: ANN401
    for layer in range(num_layers):
        dst[dst_indices, layer, 0] = src_layers[layer][src_indices]


def _state_to_device(src: Any, dst: Any, src_indices: Any, dst_indices: Any, layer_id: int, *_: Any, **__: Any) -> None:  # noqa: ANN401
    dst[dst_indices] = src[src_indices, layer_id, 0]


def _host_rows(pool: Any, refs: Any, layer: int, indices: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """A layer's rows in host memory, and how to index them with tokens."""
    view = refs[layer]
    if pool.layout == "page_first_direct":
        return view, (indices // pool.page_size, indices % pool.page_size)
    return view, (indices,)


def _to_host(pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str) -> None:  # noqa: ANN401
    del device_pool, io_backend
    for layer in range(pool.layer_num):
        for refs, buffers in ((pool.k_data_refs, pool.device_k_buffers), (pool.v_data_refs, pool.device_v_buffers)):
            view, rows = _host_rows(pool, refs, layer, host_indices)
            view[rows] = buffers[layer][device_indices]


def _to_device(
    pool: Any,  # noqa: ANN401
    device_pool: Any,  # noqa: ANN401
    host_indices: Any,  # noqa: ANN401
    device_indices: Any,  # noqa: ANN401
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    del device_pool, io_backend, is_draft
    for refs, buffers in ((pool.k_data_refs, pool.device_k_buffers), (pool.v_data_refs, pool.device_v_buffers)):
        view, rows = _host_rows(pool, refs, layer_id, host_indices)
        buffers[layer_id][device_indices] = view[rows]
