"""The parts of the SGLang backend that need no SGLang: keys, options, memory, namespaces, prefixes of several pools."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvclient import InvalidArgument
from kvclient.engines.file_stamps import mark_engine_start
from kvclient.engines.options import HookOptions
from kvclient.engines.sglang.generations import Generations
from kvclient.engines.sglang.host_pages import HostPages
from kvclient.engines.sglang.model_facts import model_text
from kvclient.engines.sglang.namespaces import page_spec
from kvclient.engines.sglang.options import BackendOptions
from kvclient.engines.sglang.page_keys import PageKeys, Prefix
from kvclient.engines.sglang.pool_hits import LeadingPages, TrailingPages, restorable

SHA = st.binary(min_size=32, max_size=32).map(bytes.hex)


@given(st.lists(SHA, max_size=20), st.binary(min_size=16, max_size=16))
def test_page_keys_are_masked_heads_of_hashes(hashes: list[str], namespace: bytes) -> None:
    want = [bytes(a ^ b for a, b in zip(bytes.fromhex(one)[:16], namespace, strict=True)) for one in hashes]
    assert PageKeys(namespace).of(hashes) == want


@pytest.mark.parametrize(
    "wrong", [["00"], ["0" * 63, "0" * 65], ["g" * 64], [" " + "0" * 62 + " "], ["0" * 64, ""], ["é" * 32], ["0" * 128]]
)
def test_page_keys_malformed_hash_is_rejected(wrong: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        PageKeys(bytes(16)).of(wrong)


def test_prefix_without_hashes_is_unknown() -> None:
    assert not Prefix(None).is_known
    assert Prefix([]).is_known
    assert Prefix(["00" * 32] * 3).depth == 3


def test_backend_options() -> None:
    plain = {"backend_name": "kvstore", "module_path": "m", "class_name": "C"}
    assert not BackendOptions.from_mapping(plain).chained
    in_place = BackendOptions.from_mapping({**plain, "interface_v1": 1, "tenant": "t"})
    assert in_place.chained
    assert in_place.zero_copy
    assert in_place.hook.tenant == "t"
    assert in_place.hook.hash_algorithm == "sha256-128"
    assert not BackendOptions.from_mapping({**plain, "interface_v1": 1, "chained": False}).chained
    of_sglang = {"hicache_storage_pass_prefix_keys": True, "prefetch_threshold": 64, "prefetch_timeout_base": 1}
    assert BackendOptions.from_mapping(
        {**plain, **of_sglang, "prefetch_timeout_per_ki_token": 0.25}
    ) == BackendOptions.from_mapping(plain)
    for wrong in ({"chained": 1}, {"kv_cache_dtype": 8}, {"mend_prefixes": "no"}, {"tenannt": "t"}, {"load_deadline_s": 0}):
        with pytest.raises(InvalidArgument):
            BackendOptions.from_mapping({**plain, **wrong})


@dataclass
class Config:
    """The fields of SGLang's ``HiCacheStorageConfig`` that the backend reads."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    model_name: str | None = "m"
    dp_rank: int = 0


class Pool:
    """A host pool whose pages consist of pieces: ``[pieces, pages, bytes]``."""

    layout = "page_first"
    dtype = torch.uint8
    page_size = 2
    head_num = 2
    layer_num = 2

    def __init__(self, sizes: list[int], pages: int = 8) -> None:
        self.pieces = [torch.zeros((pages, size), dtype=torch.uint8) for size in sizes]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = (indices[:: self.page_size] // self.page_size).tolist()
        pointers = [piece[page].data_ptr() for page in pages for piece in self.pieces]
        return pointers, [piece.shape[1] for piece in self.pieces] * len(pages)

    def page(self, page: int) -> bytes:
        return b"".join(piece[page].numpy().tobytes() for piece in self.pieces)


def indices(pages: list[int]) -> torch.Tensor:
    return torch.tensor([page * Pool.page_size + token for page in pages for token in range(Pool.page_size)])


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True),
    st.randoms(use_true_random=False),
)
def test_pool_block_segments_are_its_pieces(sizes: list[int], pages: list[int], random: Any) -> None:
    """For any pieces and positions, a block's segments are its pieces in order, and writes change no other bytes."""
    pool = Pool(sizes)
    for piece in pool.pieces:
        piece.copy_(torch.tensor(bytearray(random.randbytes(piece.numel())), dtype=torch.uint8).reshape(piece.shape))
    host = HostPages(pool, zero_copy=True)
    assert host.in_place
    assert host.shape.block_bytes == sum(sizes)
    before = [pool.page(page) for page in range(8)]
    buffer = host.source(indices(pages), len(pages))
    assert buffer.count == len(pages)
    for block, page in enumerate(pages):
        assert b"".join(buffer.segments(block, 0, host.shape.layers)) == before[page]
        if host.shape.layers > 1:
            one = b"".join(buffer.segments(block, 1, 1))
            assert one == before[page][host.shape.layer_block_bytes : 2 * host.shape.layer_block_bytes]
    target, deliver = host.target(indices(pages), len(pages))
    for segment in target.segments(0, 0, host.shape.layers):
        segment[:] = bytes(len(segment))
    deliver([True] * len(pages))
    for page in range(8):
        assert pool.page(page) == (bytes(sum(sizes)) if page == pages[0] else before[page])


def test_pool_positions_out_of_range_are_rejected() -> None:
    host = HostPages(Pool([4, 4]), zero_copy=True)
    for wrong in (indices([1]), indices([1, 2, 3])):
        with pytest.raises(InvalidArgument):
            host.source(wrong, 2)


def test_namespace_depends_on_all_that_changes_pages() -> None:
    """Each difference between pages changes the namespace. The data-parallel rank and the tensor-parallel rank of MLA do not."""

    def of(config: Config | None = None, options: HookOptions | None = None, **changes: Any) -> bytes:
        pool = Pool([4, 4])
        for name, value in changes.pop("pool", {}).items():
            setattr(pool, name, value)
        pages = HostPages(pool, zero_copy=True)
        given = {"name": "kv", "chained": True, "cache_dtype": "fp8_e4m3", "key_tokens": 2, **changes}
        return page_spec(options or HookOptions(), config or Config(), pool, pages, **given).namespace

    others = [
        of(Config(tp_rank=0, tp_size=2)),
        of(Config(tp_rank=1, tp_size=2)),
        of(Config(pp_rank=0, pp_size=2)),
        of(Config(pp_rank=1, pp_size=2)),
        of(Config(attn_cp_rank=1, attn_cp_size=2)),
        of(Config(model_name="other")),
        of(options=HookOptions(tenant="t")),
        of(options=HookOptions(weights_epoch="2")),
        of(options=HookOptions(salt="s")),
        of(chained=False),
        of(cache_dtype="fp8_e5m2"),
        of(key_tokens=4),
        of(name="draft"),
        of(pool={"layout": "layer_first"}),
        of(pool={"head_num": 4}),
        of(pool={"storage_format_tag": "x"}),
        of(pool={"device_pool": SimpleNamespace(kv_cache_layout="hnd")}),
        of(pool={"device_pool": SimpleNamespace(kv_cache_layout="vectorized_5d")}),
    ]
    assert len({of(), *others}) == len(others) + 1
    assert of(Config(dp_rank=3)) == of()
    assert of(pool={"device_pool": SimpleNamespace(kv_cache_layout="nhd")}) == of()
    latent: dict[str, Any] = {"head_num": None}
    ranks = [Config(is_mla_model=True, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    assert of(ranks[0], pool=latent) == of(ranks[1], pool=latent)
    assert of(ranks[0], name="mamba", pool=latent) != of(ranks[1], name="mamba", pool=latent), "state is sharded all the same"
    assert of(ranks[0], name="draft") != of(ranks[1], name="draft"), "and so are heads"
    with pytest.raises(InvalidArgument):
        of(Config(model_name=None))


def test_namespace_depends_on_amd_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang stores fp8 as bytes, of another format on each of these."""

    def of() -> bytes:
        pool = Pool([4, 4])
        pages = HostPages(pool, zero_copy=True)
        given: dict[str, Any] = {"name": "kv", "chained": True, "cache_dtype": "fp8_e4m3", "key_tokens": 2}
        return page_spec(HookOptions(), Config(), pool, pages, **given).namespace

    spaces = {of()}
    monkeypatch.setattr("torch.version.hip", "7.0")
    assert of() in spaces, "a build of torch for AMD on a host without a device"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for architecture in ("gfx942:sramecc+:xnack-", "gfx950"):
        device = SimpleNamespace(gcnArchName=architecture)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda _, device=device: device)
        spaces.add(of())
    assert len(spaces) == 3


@given(
    st.integers(0, 12),
    st.lists(
        st.one_of(
            st.integers(0, 14),
            st.tuples(st.lists(st.booleans(), min_size=14, max_size=14), st.integers(1, 4)),
        ),
        max_size=3,
    ),
)
def test_prefix_restorable_if_every_pool_has_its_pages(kv_pages: int, pools: list[Any]) -> None:
    """Compare with the definition: a prefix can be restored if every pool has all pages that it needs for it."""
    made: list[tuple[str, LeadingPages | TrailingPages]] = []
    for number, pool in enumerate(pools):
        if isinstance(pool, int):
            made.append((f"p{number}", LeadingPages(pool)))
        else:
            made.append((f"p{number}", TrailingPages(pool[0], pool[1])))

    def allowed(pool: Any, length: int) -> bool:
        if isinstance(pool, int):
            return length <= pool
        return all(pool[0][max(0, length - pool[1]) : length])

    want = [length for length in range(1, kv_pages + 1) if all(allowed(pool, length) for pool in pools)]
    found = restorable(kv_pages, made)
    assert found.lengths == want
    assert found.pages == (want[-1] if want else 0)
    for number, pool in enumerate(pools):
        alone = [length for length in range(1, kv_pages + 1) if allowed(pool, length)]
        assert found.by_pool.get(f"p{number}", 0) == (alone[-1] if alone else 0)


def server_of(folder: Path, **arguments: Any) -> Any:
    """SGLang's description of a server that starts now with the model in a folder."""
    mark_engine_start()
    return SimpleNamespace(**{"model_path": str(folder), "load_format": "auto", "model_loader_extra_config": "{}", **arguments})


def model_folder(folder: Path, weights: bytes = b"weights", config: object = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(
        json.dumps(config if config is not None else {"rope_theta": 1, "transformers_version": "5"})
    )
    return folder


@pytest.mark.parametrize("sample", [True, False])
@pytest.mark.parametrize(
    "other",
    [
        {"quantization": "fp8"},
        {"json_model_override_args": '{"rope_theta": 2}'},
        {"load_format": "dummy"},
        {"load_format": "layered"},
        {"model_loader_extra_config": '{"presharded_path": "x"}'},
        {"dtype": "float16"},
        {"torchao_config": "int4wo-128"},
        {"context_length": 4096},
    ],
)
def test_server_settings_that_change_kv_change_namespace(tmp_path: Path, other: dict[str, Any], sample: bool) -> None:
    folder = model_folder(tmp_path / "m")
    how: dict[str, Any] = {"draft": False, "sample": sample, "make_unique": lambda: "x"}
    assert model_text(server_of(folder), **how) == model_text(server_of(model_folder(tmp_path / "copy")), **how) != ""
    assert model_text(server_of(folder, **other), **how) != model_text(server_of(folder), **how)


def test_weights_are_hashed_unless_epoch_is_named(tmp_path: Path) -> None:
    first, trained, other = (
        model_folder(tmp_path / "a"),
        model_folder(tmp_path / "b", b"trained on"),
        model_folder(tmp_path / "c", config={"rope_theta": 1}),
    )
    drawn = iter(range(9))

    def text(folder: Path, sample: bool, draft: bool = False, **arguments: Any) -> str:
        return model_text(server_of(folder, **arguments), draft=draft, sample=sample, make_unique=lambda: str(next(drawn)))

    assert text(first, True) == text(other, True) != text(trained, True)
    assert text(first, False) == text(trained, False) != text(model_folder(tmp_path / "d", config={"rope_theta": 2}), False)
    assert text(tmp_path / "elsewhere", True) != text(tmp_path / "elsewhere", True), "weights that cannot be told apart"
    assert text(first, True, load_format="dummy") != text(first, True, load_format="dummy")
    drafts = [
        text(first, True, draft, speculative_draft_model_path=str(one)) for draft in (True, False) for one in (first, trained)
    ]
    assert len(set(drafts)) == 3, "of a pool that may hold the draft model's KV"
    assert model_text(None, draft=False, sample=True, make_unique=str) == "", "no server"


def test_kv_scales_are_identified_by_content(tmp_path: Path) -> None:
    folder, scales, drawn = model_folder(tmp_path / "m"), tmp_path / "scales.json", iter(range(9))

    def text() -> str:
        server = server_of(folder, quantization_param_path=str(scales))
        return model_text(server, draft=False, sample=False, make_unique=lambda: str(next(drawn)))

    assert text() != text(), "no file"
    scales.write_text("1")
    first = text()
    assert first == text()
    scales.write_text("2")
    assert text() != first


@pytest.mark.parametrize(
    ("arguments", "config", "shared"),
    [
        ({"quantization": "modelopt_fp8"}, {}, False),
        ({"quantization": "modelopt_fp8"}, {"quantization_config": {}}, True),
        ({"modelopt_checkpoint_restore_path": "/a"}, {"quantization_config": {}}, False),
        ({"quantize_and_serve": True}, {}, False),
        ({"quantization": "fp8"}, {}, True),
    ],
)
def test_weights_of_modelopt_are_shared_only_if_named(
    tmp_path: Path, arguments: dict[str, Any], config: dict[str, Any], shared: bool
) -> None:
    folder, drawn = model_folder(tmp_path / "m", config=config), iter(range(9))

    def text(*, sample: bool) -> str:
        server = server_of(folder, **arguments)
        return model_text(server, draft=False, sample=sample, make_unique=lambda: str(next(drawn)))

    assert (text(sample=True) == text(sample=True)) is shared
    assert text(sample=False) == text(sample=False)


def test_named_weights_differ_by_restored_checkpoint(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    servers = [server_of(folder, modelopt_checkpoint_restore_path=path) for path in ("/a", "/b", None)]
    assert len({model_text(server, draft=False, sample=False, make_unique=str) for server in servers}) == 3


@pytest.mark.parametrize(
    ("name", "arguments"), [("modeling_own.py", {"trust_remote_code": True}), ("preprocessor_config.json", {})]
)
def test_named_weights_differ_by_own_code_or_processor(tmp_path: Path, name: str, arguments: dict[str, Any]) -> None:
    folder = model_folder(tmp_path / "m")

    def text(content: str) -> str:
        (folder / name).write_text(content)
        return model_text(server_of(folder, **arguments), draft=False, sample=False, make_unique=lambda: "x")

    assert text("1") == text("1") != text("2")


@pytest.mark.parametrize(
    "typed", [lambda path: [path], lambda path: [f"n={path}"], lambda path: {"n": path}, lambda path: [{"lora_path": path}]]
)
def test_adapters_at_server_start_change_namespace(tmp_path: Path, typed: Any) -> None:
    """SGLang's hashes identify adapters by name and path."""
    folder, adapter = model_folder(tmp_path / "m"), model_folder(tmp_path / "lora")
    drawn = iter(range(9))

    def text() -> str:
        server = server_of(folder, lora_paths=typed(str(adapter)))
        return model_text(server, draft=False, sample=False, make_unique=lambda: str(next(drawn)))

    assert text() != text(), "nothing tells what it is"
    (adapter / "adapter_config.json").write_text("{}")
    first = text()
    assert first == text()
    model_folder(adapter, b"trained on")
    assert text() != first


@given(st.lists(st.sampled_from(["clear", "begin_update", "pause", "resume", "a", "b", ""]), max_size=30))
def test_generations_never_give_old_pages_or_while_paused(events: list[str]) -> None:
    """Names that stored before a clear or an update get another generation, and none while the engine's caches may be old."""
    generations, stored, paused = Generations(), set[tuple[str, int]](), False
    for event in events:
        if event in {"a", "b", ""}:
            generation = generations.of(event)
            assert (generation is None) == paused
            if generation is not None:
                stored.add((event, generation))
            continue
        getattr(generations, event)()
        paused = event in {"begin_update", "pause"}
        if event in {"clear", "begin_update"}:
            assert all((name, generations.of(name)) not in stored for name, _ in stored)
