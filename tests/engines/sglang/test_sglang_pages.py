"""Pages go from SGLang's host pools into the store and come back bit for bit, in all layouts and through both interfaces."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang_cases import PAGE, contents, hashes, positions, prefixed, randomise

from kvclient.engines.file_stamps import mark_engine_start
from kvclient.engines.sglang.generations import Generations
from kvstore.lab.sglang_bed import host_pool, mla_host_pool, storage_config
from support.wait import wait_until

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
SCATTERED = [3, 1, 7, 9, 2, 20, 21, 22]

OpenBackend = Callable[..., Any]


def pool_of(layout: str = "page_first", **sizes: int) -> Any:
    return host_pool(layout, tokens=512, page=PAGE, **sizes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_place(open_backend: OpenBackend, layout: str) -> None:
    """Pages stored in two batches, from scattered places, loaded in one into other places by another engine."""
    pool, names = pool_of(layout), hashes("a", len(SCATTERED))
    backend = open_backend(pool)
    randomise(pool, 1)
    want = contents(pool, SCATTERED)
    assert backend.batch_set_v1(names[:5], positions(SCATTERED[:5]), prefixed([])) == [True] * 5
    assert backend.batch_set_v1(names[5:], positions(SCATTERED[5:]), prefixed(names[:5])) == [True] * 3
    wait_until(lambda: backend.batch_exists(names) == 8, "all pages can be looked up")

    other = pool_of(layout)
    reader = open_backend(other)
    elsewhere = [31, 30, 4, 5, 6, 40, 0, 17]
    untouched = contents(other, [1, 2, 3, 7, 29, 32])
    assert reader.batch_exists(names) == 8
    assert reader.batch_get_v1(names, positions(elsewhere), prefixed([])) == [True] * 8
    assert torch.equal(contents(other, elsewhere), want)
    assert torch.equal(contents(other, [1, 2, 3, 7, 29, 32]), untouched), "memory outside of the pages was written"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_a_row(open_backend: OpenBackend, layout: str) -> None:
    """Adjacent pages move as one array; adjacent or scattered, their bytes are the same."""
    pool, names = pool_of(layout), hashes("a", 8)
    backend = open_backend(pool)
    randomise(pool, 2)
    want, rest = contents(pool, range(4, 12)), contents(pool, [3, 12, 19, 28])
    assert all(backend.batch_set_v1(names, positions(range(4, 12)), prefixed([])))
    for places in (range(20, 28), SCATTERED):
        assert all(backend.batch_get_v1(names, positions(places), prefixed([])))
        assert torch.equal(contents(pool, places), want)
    assert torch.equal(contents(pool, [12, 19, 28]), rest[1:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flat(open_backend: OpenBackend, layout: str) -> None:
    pool, names = pool_of(layout), hashes("a", 4)
    backend = open_backend(pool, interface_v1=0)
    randomise(pool, 2)
    want = contents(pool, [5, 2, 9, 1])
    assert backend.batch_set(names, [pool.get_data_page(page * PAGE, flat=True) for page in (5, 2, 9, 1)])
    wait_until(lambda: backend.batch_exists(names) == 4, "all pages can be looked up")
    assert backend.exists(names[3])
    loaded = backend.batch_get(names, [pool.get_dummy_flat_data_page() for _ in names])
    assert torch.equal(torch.stack(loaded), want)
    assert torch.equal(backend.get(names[2], pool.get_dummy_flat_data_page()), want[2])
    assert backend.set(names[2], want[2])


@pytest.mark.parametrize("in_place", [1, 0])
def test_every_page_that_is_said_to_have_come_is_there(open_backend: OpenBackend, in_place: int) -> None:
    """Also after a failed one: SGLang does not ask for those, but other engines may."""
    pool, names = pool_of(), hashes("a", 4)
    backend = open_backend(pool, interface_v1=in_place, chained=False)
    randomise(pool, 6)
    want = contents(pool, [0, 3])
    for page in (0, 3):
        assert backend.batch_set_v1([names[page]], positions([page]), prefixed([])) == [True]
    loaded = backend.batch_get_v1(names, positions(range(10, 14)), prefixed([]))
    assert loaded == [True, False, False, True]
    assert torch.equal(contents(pool, [10, 13]), want)


@pytest.mark.parametrize("in_place", [1, 0])
def test_positions_that_the_pool_does_not_have_are_misses(open_backend: OpenBackend, in_place: int) -> None:
    """Without the guard the memory is unmapped: reading it ends the process."""
    pool, names = pool_of(), hashes("a", 1)
    backend = open_backend(pool, interface_v1=in_place, chained=False)
    for wrong in (torch.arange(-PAGE, 0), torch.arange(10**9, 10**9 + PAGE), torch.arange(pool.size, pool.size + PAGE)):
        assert backend.batch_set_v1(names, wrong, prefixed([])) == [False]
        assert backend.batch_get_v1(names, wrong, prefixed([])) == [False]
    last = torch.arange(pool.size - PAGE, pool.size)
    assert backend.batch_set_v1(names, last, prefixed([])) == [True]


def test_a_batch_in_the_middle_of_a_chain(open_backend: OpenBackend) -> None:
    """With the hashes before them, pages in the middle of a prompt are found; without the beginning, they are not."""
    pool, names = pool_of(), hashes("a", 6)
    backend = open_backend(pool)
    randomise(pool, 3)
    assert all(backend.batch_set_v1(names[3:], positions([3, 4, 5]), prefixed(names[:3])))
    assert all(backend.batch_set_v1(names[:3], positions([0, 1, 2]), prefixed([])))
    wait_until(lambda: backend.batch_exists(names) == 6, "the chain can be looked up")
    assert backend.batch_exists(names[3:], prefixed(names[:3])) == 3
    assert backend.batch_exists(names[3:]) == 0, "at the head of a chain there are no such pages"
    assert backend.batch_exists([*names[:4], *hashes("b", 2)]) == 4
    want = contents(pool, [4, 5])
    assert backend.batch_get_v1(names[4:], positions([10, 11]), prefixed(names[:4])) == [True, True]
    assert torch.equal(contents(pool, [10, 11]), want)


def test_without_prefixes_chains_are_not_stored(open_backend: OpenBackend) -> None:
    backend = open_backend(pool_of())
    assert backend.batch_set_v1(hashes("a", 2), positions([0, 1])) == [False, False]
    assert backend.counters()["sglang_set_without_prefix_pages_total"] == 2
    alone = open_backend(pool_of(), chained=False)
    assert alone.batch_set_v1(hashes("a", 2), positions([0, 1])) == [True, True]
    wait_until(lambda: alone.batch_exists(hashes("a", 2)) == 2, "pages by themselves need none")


def test_pages_set_twice_and_by_many_threads(open_backend: OpenBackend) -> None:
    pool, names = pool_of(), hashes("a", 8)
    backend = open_backend(pool)
    randomise(pool, 4)
    want = contents(pool, range(8))
    answers: list[list[bool]] = []

    def store() -> None:
        answers.append(backend.batch_set_v1(names, positions(range(8)), prefixed([])))

    threads = [threading.Thread(target=store) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[True] * 8] * 4
    wait_until(lambda: backend.batch_exists(names) == 8, "the pages can be looked up")
    assert backend.batch_get_v1(names, positions(range(20, 28)), prefixed([])) == [True] * 8
    assert torch.equal(contents(pool, range(20, 28)), want)
    assert backend.counters()["client_store_stored_blocks_total"] == 8


@pytest.mark.parametrize("in_place", [1, 0])
def test_kv_pool_without_bytes_hides_no_other_pool(
    open_backend: OpenBackend, monkeypatch: pytest.MonkeyPatch, in_place: int
) -> None:
    """DeepSeek V4: the KV is in pools beside an anchor, which only numbers the pages."""
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    generations = Generations()
    monkeypatch.setattr("kvclient.engines.sglang.backend.OF_THIS_PROCESS", generations)
    anchor, beside, names = LogicalHostPool(512, PAGE, "page_first"), pool_of(), hashes("a", 2)
    backend = open_backend(anchor, interface_v1=in_place)
    backend.register_mem_host_pool_v2(beside, "c4")
    randomise(beside, 8)

    def moved(move: str, pages: list[int]) -> list[bool]:
        of_kv = getattr(backend, f"batch_{move}_v1")(names, positions(pages), prefixed([]))
        flat = getattr(backend, f"batch_{move}")(names, [anchor.get_dummy_flat_data_page() for _ in names])
        transfer = PoolTransfer(name="c4", host_indices=positions(pages), keys=names)
        of_c4 = getattr(backend, f"batch_{move}_v2")([transfer], prefixed([]))["c4"]
        assert all(of_kv) == (flat is True or (isinstance(flat, list) and None not in flat))
        return [*of_kv, *of_c4]

    def found() -> int:
        return int(backend.batch_exists_v2(names, [PoolTransfer(name="c4")], prefixed([])).kv_hit_pages)

    assert found() == 0
    assert moved("set", [0, 1]) == [True] * 4
    wait_until(lambda: found() == 2, "the pages can be looked up")
    assert moved("get", [4, 5]) == [True] * 4
    assert torch.equal(contents(beside, [4, 5]), contents(beside, [0, 1]))
    generations.pause()
    assert moved("get", [6, 7]) == moved("set", [0, 1]) == [False] * 4
    assert not backend.counters().get("sglang_get_broke_total")


def test_what_differs_is_not_shared(open_backend: OpenBackend) -> None:
    """Another layout, size, rank, epoch, tenant or way to cut the model: nothing is found, and the pages stay separate."""
    names = hashes("a", 2)
    rank = {"tp_rank": 1, "tp_size": 2}
    first = pool_of()
    ways: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (first, {}, {}),
        (pool_of("page_first_direct"), {}, {}),
        (pool_of("layer_first"), {}, {}),
        (pool_of(heads=4, head_dim=16), {}, {}),
        (pool_of(layers=2, heads=4), {}, {}),
        (pool_of(), {"tp_rank": 0, "tp_size": 2}, {}),
        (pool_of(), rank, {}),
        (pool_of(), {"pp_rank": 1, "pp_size": 2}, {}),
        (pool_of(), {"attn_cp_rank": 1, "attn_cp_size": 2}, {}),
        (pool_of(), {}, {"weights_epoch": "2"}),
        (pool_of(), {}, {"tenant": "other"}),
    ]
    backends = []
    for number, (pool, config, options) in enumerate(ways):
        randomise(pool, number)
        backend = open_backend(pool, config, **options)
        assert backend.batch_exists(names) == 0, f"way {number} finds what another stored"
        assert backend.batch_set_v1(names, positions([0, 1]), prefixed([])) == [True, True]
        wait_until(lambda backend=backend: backend.batch_exists(names) == 2, "the pages can be looked up")
        backends.append(backend)
    for (pool, _, _), backend in zip(ways, backends, strict=True):
        want = contents(pool, [0, 1])
        assert backend.batch_get_v1(names, positions([8, 9]), prefixed([])) == [True, True]
        assert torch.equal(contents(pool, [8, 9]), want)
    same = open_backend(pool_of(), {**rank, "dp_rank": 3})
    assert same.batch_exists(names) == 2, "data-parallel ranks share"


def test_ranks_of_replicated_kv_share(open_backend: OpenBackend) -> None:
    """MLA: rank 0 writes, all read."""
    for layout in ("page_first", "layer_first"):
        names = hashes(layout, 3)
        pool, other = mla_host_pool(layout, tokens=512, page=PAGE), mla_host_pool(layout, tokens=512, page=PAGE)
        config = {"is_mla_model": True, "tp_size": 2}
        writer = open_backend(pool, {**config, "tp_rank": 0})
        reader = open_backend(other, {**config, "tp_rank": 1})
        randomise(pool, 5)
        assert all(writer.batch_set_v1(names, positions([4, 2, 7]), prefixed([])))
        wait_until(lambda names=names, reader=reader: reader.batch_exists(names) == 3, "the other rank finds them")
        assert all(reader.batch_get_v1(names, positions([1, 0, 9]), prefixed([])))
        assert torch.equal(contents(other, [1, 0, 9]), contents(pool, [4, 2, 7]))


def test_draft_with_heads_is_stored_by_all_ranks(open_backend: OpenBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside MLA, whose KV rank 0 alone stores. Other backends of the process are left alone."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    monkeypatch.setattr(HybridCacheController, "should_backup", HybridCacheController.should_backup)  # to remove the patch
    latents, transfer = mla_host_pool("page_first", tokens=512, page=PAGE), PoolTransfer(name=PoolName.DRAFT)
    backend = open_backend(latents, {"is_mla_model": True, "tp_size": 2, "tp_rank": 1})

    def stores(draft: Any, *, backend: object = backend, rank: int = 1) -> bool:
        controller = object.__new__(HybridCacheController)
        controller.storage_config = storage_config({}, is_mla_model=True, tp_size=2, tp_rank=rank)
        controller.storage_backend_type, controller.storage_backend = "dynamic", backend
        controller.mem_pool_host = SimpleNamespace(entry_map={PoolName.DRAFT: SimpleNamespace(host_pool=draft)})
        return bool(controller.should_backup(transfer))

    assert stores(pool_of())
    assert not stores(latents)
    assert stores(latents, rank=0)
    assert not stores(pool_of(), backend=object())


def test_clear_hides_what_was_stored(open_backend: OpenBackend) -> None:
    pool, names = pool_of(), hashes("a", 2)
    backend = open_backend(pool)
    randomise(pool, 6)
    assert all(backend.batch_set_v1(names, positions([0, 1]), prefixed([])))
    wait_until(lambda: backend.batch_exists(names) == 2, "the pages can be looked up")
    backend.clear()
    assert backend.batch_exists(names) == 0
    assert backend.batch_get_v1(names, positions([4, 5]), prefixed([])) == [False, False]
    randomise(pool, 7)
    want = contents(pool, [0, 1])
    assert all(backend.batch_set_v1(names, positions([0, 1]), prefixed([])))
    wait_until(lambda: backend.batch_exists(names) == 2, "pages stored afterwards are found")
    assert all(backend.batch_get_v1(names, positions([4, 5]), prefixed([])))
    assert torch.equal(contents(pool, [4, 5]), want)


def test_clear_then_attach_again_hides_stored_pages(open_backend: OpenBackend) -> None:
    """SGLang attaches storage with a new backend in the same engine."""
    pool, names = pool_of(), hashes("a", 2)
    backend = open_backend(pool)
    assert all(backend.batch_set_v1(names, positions([0, 1]), prefixed([])))
    wait_until(lambda: backend.batch_exists(names) == 2, "the pages can be looked up")
    backend.clear()
    backend.close()
    again = open_backend(pool)
    assert again.batch_exists(names) == 0
    assert again.batch_get_v1(names, positions([4, 5]), prefixed([])) == [False, False]
    again.close()


def test_clear_without_rank_id_misses_until_it_is_read(open_backend: OpenBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share pages agree on their new namespace. If that fails, nothing old is found."""
    pool, names = pool_of(), hashes("a", 2)
    backend = open_backend(pool, {"is_mla_model": True, "tp_size": 2})
    assert all(backend.batch_set_v1(names, positions([0, 1]), prefixed([])))
    wait_until(lambda: backend.batch_exists(names) == 2, "the pages can be looked up")
    with monkeypatch.context() as patch:
        unreached = mock.Mock(get_group_store=mock.Mock(side_effect=RuntimeError("connection reset by peer")))
        patch.setattr("kvclient.engines.sglang.pools.distributed", mock.Mock(group=mock.Mock(WORLD=unreached)))
        backend.clear()
        assert backend.batch_exists(names) == 0
        assert backend.batch_get_v1(names, positions([4, 5]), prefixed([])) == [False, False]
        assert backend.batch_set_v1(names, positions([0, 1]), prefixed([])) == [False, False]
    assert backend.batch_exists(names) == 0
    assert all(backend.batch_set_v1(names, positions([0, 1]), prefixed([])))


def test_cleared_engines_of_one_parent_share_nothing(open_backend: OpenBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of an engine have one process group, and share pages. Generations of engines have equal numbers."""
    names, found = hashes("a", 2), []
    for engine in ("a", "b"):
        monkeypatch.setattr("kvclient.engines.sglang.backend.OF_THIS_PROCESS", Generations())
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        ranks = []
        for rank in (0, 1):
            monkeypatch.setattr("kvclient.engines.sglang.pools._PROCESS_ID", f"{engine}{rank}")
            pool = mla_host_pool("page_first", tokens=512, page=PAGE)
            ranks.append(open_backend(pool, {"is_mla_model": True, "tp_size": 2, "tp_rank": rank}))
            if not rank:
                ranks[0].clear()
            found.append(ranks[rank].batch_exists(names))
        torch.distributed.destroy_process_group()
        assert all(ranks[0].batch_set_v1(names, positions([0, 1]), prefixed([])))
        wait_until(lambda reader=ranks[1]: reader.batch_exists(names) == 2, "the other rank finds them")
    assert found == [0, 0, 0, 0]


def test_nonsense_is_a_miss(open_backend: OpenBackend) -> None:
    """No call raises into SGLang's threads."""
    pool = pool_of()
    backend, good = open_backend(pool), hashes("a", 2)
    for names in (["nonsense", "x"], ["0" * 63, "0" * 65], ["g" * 64, "0" * 64], [f" {'0' * 62} ", "0" * 64]):
        assert backend.batch_exists(names) == 0
        assert backend.batch_set_v1(names, positions([0, 1]), prefixed([])) == [False, False]
        assert backend.batch_get_v1(names, positions([0, 1]), prefixed([])) == [False, False]
        assert backend.batch_set_v1(good, positions([0, 1]), prefixed(names[:1])) == [False, False]
    assert backend.batch_set_v1(good, positions([0]), prefixed([])) == [False, False], "one page of memory for two keys"
    assert backend.batch_get_v1(good, None, prefixed([])) == [False, False]
    assert backend.batch_set(good, [torch.zeros(3)] * 2) is False
    assert backend.batch_get(good, None) == [None, None]
    assert backend.batch_exists([]) == 0
    assert backend.batch_get_v1([], positions([0])[:0], prefixed([])) == []
    failed = {name: count for name, count in backend.counters().items() if "failed" in name or "broke" in name}
    assert failed, "and each is counted"


def test_loads_and_stores_can_be_turned_off(open_backend: OpenBackend) -> None:
    pool, names = pool_of(), hashes("a", 2)
    randomise(pool, 8)
    assert open_backend(pool, store=False).batch_set_v1(names, positions([0, 1]), prefixed([])) == [False, False]
    assert all(open_backend(pool).batch_set_v1(names, positions([0, 1]), prefixed([])))
    wait_until(lambda: open_backend(pool).batch_exists(names) == 2, "the pages can be looked up")
    silent = open_backend(pool, load=False)
    assert silent.batch_exists(names) == 0
    assert silent.batch_get_v1(names, positions([0, 1]), prefixed([])) == [False, False]


def test_metrics(open_backend: OpenBackend) -> None:
    pool, names = pool_of(), hashes("a", 3)
    backend = open_backend(pool)
    assert all(backend.batch_set_v1(names, positions([0, 1, 2]), prefixed([])))
    assert all(backend.batch_get_v1(names, positions([0, 1, 2]), prefixed([])))
    metrics = backend.get_stats()
    assert (metrics.backup_pgs, metrics.prefetch_pgs) == ([3], [3])
    assert len(metrics.backup_bandwidth) == 1
    assert metrics.prefetch_bandwidth[0] > 0
    assert backend.get_stats().backup_pgs == []
    assert backend.counters()["sglang_set_good_pages_total"] == 3


def test_weights_under_the_same_name_are_not_the_same(
    open_backend: OpenBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without ``weights_epoch``, the server's arguments and the model's files identify the weights."""
    from sglang.srt import runtime_context

    names = hashes("weights", 2)

    def opened(load_format: str = "auto", quantization: str | None = None) -> Any:
        server = SimpleNamespace(model_path=str(tmp_path), load_format=load_format, quantization=quantization)
        monkeypatch.setattr(runtime_context, "get_server_args", lambda: server)
        mark_engine_start()
        return open_backend(pool_of(), weights_epoch="")

    def held(backend: Any) -> int:
        return int(backend.batch_exists(names))

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    writer = opened()
    randomise(writer.mem_pool_host, 1)
    assert writer.batch_set_v1(names, positions([0, 1]), prefixed([])) == [True, True]
    wait_until(lambda: held(writer) == 2, "the pages can be looked up")
    assert held(opened()) == 2
    assert [held(opened("dummy")), held(opened(quantization="fp8"))] == [0, 0]
    (tmp_path / "model.safetensors").write_bytes(b"trained")
    late = open_backend(pool_of(), weights_epoch="")  # by a server that has read the ones before
    randomise(late.mem_pool_host, 2)
    assert late.batch_set_v1(names, positions([0, 1]), prefixed([])) == [True, True]
    wait_until(lambda: held(late) == 2, "the pages can be looked up")
    assert held(opened()) == 0


@pytest.mark.parametrize("drafts", [1, 0])
def test_other_draft_in_the_pool_is_not_shared(
    open_backend: OpenBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, drafts: int
) -> None:
    """SGLang keeps draft models of one layer in the pool of the KV. Elsewhere, the KV does not depend on the draft model."""
    from sglang.srt import runtime_context

    names = hashes("draft", 2)

    def opened(draft: str) -> Any:
        folders = {"model_path": str(tmp_path / "model"), "speculative_draft_model_path": str(tmp_path / draft)}
        monkeypatch.setattr(runtime_context, "get_server_args", lambda: SimpleNamespace(load_format="auto", **folders))
        mark_engine_start()
        return open_backend(pool_of(drafts=drafts), weights_epoch="")

    for name in ("model", "first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_text(name)
    writer = opened("first")
    assert writer.batch_set_v1(names, positions([0, 1]), prefixed([])) == [True, True]
    wait_until(lambda: writer.batch_exists(names) == 2, "the pages can be looked up")
    assert opened("first").batch_exists(names) == 2
    assert opened("second").batch_exists(names) == (0 if drafts else 2)


def test_from_another_process(open_backend: OpenBackend, extra: Callable[..., dict[str, object]], tmp_path: Path) -> None:
    pool, names = pool_of(), hashes("a", 4)
    script = tmp_path / "writer.py"
    script.write_text(
        "import json, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from kvstore.lab import sglang_kernels\n"
        "sglang_kernels.install()\n"
        "from kvstore.lab.sglang_bed import host_pool, storage_config\n"
        "from kvclient.engines.sglang.backend import KVStoreHiCache\n"
        "from sglang_cases import hashes, positions, prefixed, randomise\n"
        "pool = host_pool('page_first', tokens=512, page=16)\n"
        "backend = KVStoreHiCache(storage_config(json.loads(sys.argv[1])))\n"
        "backend.register_mem_pool_host(pool)\n"
        "randomise(pool, 9)\n"
        "assert all(backend.batch_set_v1(hashes('a', 4), positions([0, 1, 2, 3]), prefixed([])))\n"
        "backend.close()\n"
    )
    subprocess.run([sys.executable, str(script), json.dumps(extra())], check=True, timeout=120)
    backend = open_backend(pool)
    wait_until(lambda: backend.batch_exists(names) == 4, "pages of the other process")
    assert all(backend.batch_get_v1(names, positions([9, 8, 7, 6]), prefixed([])))
    twin = pool_of()
    randomise(twin, 9)
    assert torch.equal(contents(pool, [9, 8, 7, 6]), contents(twin, [0, 1, 2, 3]))
