"""Measure SGLang's third cache tier: pages from its host memory to the store and back, against SGLang's ``file`` backend.

Requires the environment of the engines (``make install-engines``). Backends are called as by SGLang's background threads: the
store in place (``interface_v1``), with pages as chains or as single blocks, and files through flat copies. Each call moves
64 pages, each round uses new pages, and loaded pages are compared with the stored ones. Neither side waits for a disk: the
store's node has only DRAM, and files stay in the page cache. Pages are contiguous in host memory, or scattered as after some use.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import Figure, Options, Reference, Target, interleave, options
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.lab import sglang_kernels as sglang_kernels

PAGE = 64
PAGES = 64
LAYOUTS = ("page_first", "layer_first")
SIZES = [(1, False), (4, False), (4, True)]
"""KV heads of the model (pages of half a megabyte or two megabytes), and whether pages are scattered."""
WAIT_S = 10.0


class Contestant:
    """One backend with its host pool."""

    def __init__(self, backend: Any, pool: Any, *, in_place: bool, chained: bool, scattered: bool) -> None:  # noqa: ANN401  # loaded late
        import torch
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

        backend.register_mem_pool_host(pool)
        self.backend, self.pool = backend, pool
        self._in_place = in_place
        self._prefix = HiCacheStorageExtraInfo(prefix_keys=[] if chained else None)
        order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)) if scattered else torch.arange(PAGES)
        self._from = (order[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)
        self._to = self._from + PAGES * PAGE
        self._torch = torch
        self._round = 0
        self._names: list[str] = []

    def set(self) -> float:
        """Store new pages and return pages per second."""
        self._round += 1
        self._names = [hashlib.sha256(f"{self._round}/{page}".encode()).hexdigest() for page in range(PAGES)]
        self._half(0).copy_(self._torch.randn(self._half(0).shape))
        began_s = time.perf_counter()
        stored = self._put(self._names)
        seconds = time.perf_counter() - began_s
        assert stored, "pages were not stored"
        return PAGES / seconds

    def get(self) -> float:
        """Load the pages stored last into other host pages and return pages per second."""
        ends_s = time.monotonic() + WAIT_S
        while self.backend.batch_exists(self._names) < PAGES:
            assert time.monotonic() < ends_s, "stored pages were not found"
        self._half(1).zero_()
        began_s = time.perf_counter()
        came = self._get(self._names)
        seconds = time.perf_counter() - began_s
        assert came == PAGES, f"{came} of {PAGES} pages were loaded"
        assert self._torch.equal(self._half(0), self._half(1)), "loaded bytes differ from the stored ones"
        return PAGES / seconds

    def _put(self, names: list[str]) -> bool:
        """Store pages under names: in place, or through a flat copy per page."""
        if self._in_place:
            return all(self.backend.batch_set_v1(names, self._from, self._prefix))
        stored: bool = self.backend.batch_set(names, [self.pool.get_data_page(first) for first in self._from[::PAGE]])
        return stored

    def _get(self, names: list[str]) -> int:
        """Load pages and return how many were loaded: in place, or through a flat copy per page."""
        if self._in_place:
            return sum(self.backend.batch_get_v1(names, self._to, self._prefix))
        pages = self.backend.batch_get(names, [self.pool.get_dummy_flat_data_page() for _ in names])
        loaded = 0
        for first, page in zip(self._to[::PAGE], pages or (), strict=False):
            if page is None:
                break
            self.pool.set_from_flat_data_page(first, page)
            loaded += 1
        return loaded

    def _half(self, which: int) -> Any:  # noqa: ANN401
        """Host pages to store, or host pages to load into."""
        tokens = slice(which * PAGES * PAGE, (which + 1) * PAGES * PAGE)
        return self.pool.kv_buffer[:, :, tokens] if self.pool.layout == "layer_first" else self.pool.kv_buffer[:, tokens]


def contestants(cluster: LocalCluster, folder: Path, layout: str, heads: int, *, scattered: bool) -> dict[str, Contestant]:
    """Create the contestants: the store with chains, the store with single pages, and files."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    from kvclient.engines.sglang.backend import KVStoreHiCache
    from kvstore.lab.sglang_bed import host_pool, storage_config

    def pool() -> Any:  # noqa: ANN401
        return host_pool(layout, tokens=PAGES * PAGE, page=PAGE, layers=16, heads=heads, head_dim=64)

    def store(*, chained: bool) -> Contestant:
        extra = {
            "metadata": cluster.metadata_address,
            "node": cluster.node("n").local_socket,
            "interface_v1": 1,
            "chained": chained,
            "model": f"{layout} {heads} {scattered}",
        }
        return Contestant(KVStoreHiCache(storage_config(extra)), pool(), in_place=True, chained=chained, scattered=scattered)

    files = HiCacheFile(storage_config({}), str(folder))
    return {
        "chained": store(chained=True),
        "single": store(chained=False),
        "files": Contestant(files, pool(), in_place=False, chained=False, scattered=scattered),
    }


def run(given: Options, cluster: LocalCluster, folder: Path, layout: str, heads: int, *, scattered: bool) -> None:
    """Measure all figures of one layout and size."""
    raced = contestants(cluster, folder, layout, heads, scattered=scattered)
    page_bytes = 2 * 16 * PAGE * heads * 64 * 4
    moves: dict[str, dict[str, list[float]]] = {"set": {name: [] for name in raced}, "get": {name: [] for name in raced}}

    def turn(name: str) -> float:
        for move in ("set", "get"):
            moves[move][name].append(getattr(raced[name], move)())
        return 0.0

    interleave({name: (lambda name=name: turn(name)) for name in raced}, given.repetitions)  # type: ignore[misc]
    for move, samples in moves.items():
        counted = {name: values[1:] for name, values in samples.items()}  # the first round is a warm-up
        for way in ("chained", "single"):
            given.keep(
                Figure(
                    f"sglang_{move}_pages",
                    f"SGLang: pages {'stored' if move == 'set' else 'loaded'}",
                    {"layout": layout, "page": page_bytes, "places": "scattered" if scattered else "in a row", "way": way},
                    "pages/s",
                ),
                counted[way],
                peer=Reference("SGLang's file backend", counted["files"]),
                target=Target("peer", 1.0),
                verified=True,
                notes=f"batches of {PAGES} pages of {PAGE} tokens, out of the node's DRAM; files in the page cache",
            )
    for one in raced.values():
        if hasattr(one.backend, "close"):
            one.backend.close()
    shutil.rmtree(folder)


def main() -> None:
    """Measure all layouts and sizes."""
    given = options("engine_sglang", __doc__)
    if find_spec("sglang") is None:
        sys.exit("SGLang is not installed: this benchmark runs in the environment of the engines (make install-engines)")
    sglang_kernels.install()
    with tempfile.TemporaryDirectory(dir=given.scratch) as scratch:
        folder = Path(scratch)
        with LocalCluster(
            [NodeSpec("n", dram_bytes=given.pick(full=1 << 30, quick=512 << 20, smoke=128 << 20))], folder
        ) as cluster:
            for layout in LAYOUTS:
                for heads, scattered in given.pick(full=SIZES, quick=SIZES, smoke=SIZES[:1]):
                    run(given, cluster, folder / "files", layout, heads, scattered=scattered)


if __name__ == "__main__":
    main()
