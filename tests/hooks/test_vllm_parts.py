"""Small parts of the vLLM connector: keys, pages, namespaces, options, epochs, answers."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvclient import BlockBuffer, CacheSpec, InvalidArgument, KeyChain, encode_extra
from kvclient.engines.file_stamps import mark_engine_start
from kvclient.engines.model_files import sampled_digest
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.identity.adapters import Adapters, AdapterWeights
from kvclient.engines.vllm.identity.engine_facts import (
    are_media_named,
    check_launcher,
    check_steps,
    files_text,
    keeps_drafts,
    model_digest,
    whole_prompts_only,
)
from kvclient.engines.vllm.identity.keys import RequestKeys, is_hashable, request_extras
from kvclient.engines.vllm.identity.kv_groups import GroupView
from kvclient.engines.vllm.identity.model_weights import ModelWeights
from kvclient.engines.vllm.identity.namespaces import GroupFacts, chain_spec, group_spec
from kvclient.engines.vllm.memory.pages import GroupPages, page_order
from kvclient.engines.vllm.options import ConnectorOptions
from kvclient.engines.vllm.plan import WorkerOutput
from kvstore.core.keys import NamespaceKeyMask

SPEC = CacheSpec(model="m", block_tokens=4, layers=2, layer_block_bytes=64)
FACTS = GroupFacts("m", "d", "float32", 4, ("a", "b"), 64, (2, 4, 2), "full", "CPU_ATTN", "vec", "0.32")


def asks(**fields: Any) -> Any:
    return SimpleNamespace(**{"mm_features": [], "lora_request": None, "cache_salt": None, "prompt_embeds": None, **fields})


def image(offset: int, length: int, identifier: str = "i") -> Any:
    return SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length), identifier=identifier)


@given(tokens=st.lists(st.integers(0, 1 << 20), max_size=60), cuts=st.lists(st.integers(0, 20), max_size=6), salted=st.booleans())
def test_keys_computed_in_steps_equal_keys_of_whole(tokens: list[int], cuts: list[int], salted: bool) -> None:
    chain = KeyChain(SPEC)
    extras = request_extras(asks(cache_salt="s" if salted else None, mm_features=[image(5, 9)]), None, 4)
    keys = RequestKeys(chain, extras)
    for blocks in sorted(cuts):
        assert keys.upto(tokens, blocks) == chain.keys(tokens, extras=extras)[:blocks]
    assert keys.upto(tokens, len(tokens)) == chain.keys(tokens, extras=extras)


def adapter_of(path: str, number: int = 1) -> SimpleNamespace:
    return SimpleNamespace(lora_name="n", lora_path=path, lora_int_id=number)


def adapter_folder(path: Path, weights: bytes = b"one", alpha: int = 16) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_model.safetensors").write_bytes(weights)
    (path / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
    return path


def digest_in(adapters: Adapters, path: Path | str, number: int = 1) -> str | None:
    weights = adapters.weights(adapter_of(str(path), number))
    return weights.digest if weights is not None else None


def test_adapter_digest_depends_on_files_not_path(tmp_path: Path) -> None:
    folders = [adapter_folder(tmp_path / name, *what) for name, *what in (("a",), ("b",), ("c", b"two"), ("d", b"one", 32))]
    digests = [digest_in(Adapters(ConnectorCounters()), folder) for folder in folders]
    assert None not in digests
    assert digests[0] == digests[1], "a copy elsewhere"
    assert len(set(digests)) == 3, "other weights, or the same weights times another factor"


def test_adapter_with_changed_files_is_not_shared(tmp_path: Path) -> None:
    """vLLM reads the files again if it evicted the adapter, so its version is unknown."""
    folder, copy = adapter_folder(tmp_path / "a"), adapter_folder(tmp_path / "b")
    tally = ConnectorCounters()
    adapters = Adapters(tally)
    weights = adapters.of_request(adapter_of(str(folder)))
    assert weights is not None
    assert weights.unchanged()
    assert tally.totals() == {}
    then = (folder / "adapter_model.safetensors").stat()
    adapter_folder(folder, b"two")
    os.utime(folder / "adapter_model.safetensors", ns=(then.st_atime_ns, then.st_mtime_ns))
    assert not weights.unchanged(), "also where its time was set back"
    assert digest_in(Adapters(ConnectorCounters()), folder) != weights.digest
    assert adapters.of_request(adapter_of(str(folder))) is None
    adapter_folder(folder, b"one")
    assert adapters.of_request(adapter_of(str(folder))) is None, "nor when the old ones are back: the engine may have the others"
    assert digest_in(adapters, folder, 2) is None, "nor by another number: vLLM's prefix cache knows the path"
    assert digest_in(adapters, copy) is None, "nor elsewhere: vLLM has the weights of that number"
    assert digest_in(adapters, adapter_folder(tmp_path / "c"), 3) == weights.digest
    assert tally.totals() == {"adapters_unknown": 2}


def test_adapter_digest_depends_on_target_modules(tmp_path: Path) -> None:
    """vLLM applies the adapter to other modules with ``--lora-target-modules``."""
    folder, digests = adapter_folder(tmp_path / "a"), []
    for modules in ((), ("q_proj",), ("q_proj", "v_proj"), ("v_proj", "q_proj")):
        adapters = Adapters(ConnectorCounters())
        adapters.target_modules = modules
        digests.append(digest_in(adapters, folder))
    assert digests[2] == digests[3]
    assert len(set(digests)) == 3


def test_adapter_number_of_two_folders_is_not_shared(tmp_path: Path) -> None:
    """vLLM computes with the first folder."""
    adapters = Adapters(ConnectorCounters())
    assert digest_in(adapters, adapter_folder(tmp_path / "a")) is not None
    assert digest_in(adapters, adapter_folder(tmp_path / "b", b"two")) is None
    assert digest_in(adapters, tmp_path / "a", 2) is not None


def test_adapters_beyond_the_bound_are_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvclient.engines.vllm.identity.adapters._MOST_ADAPTERS", 1)
    tally = ConnectorCounters()
    adapters = Adapters(tally)
    a, b = (adapter_of(str(adapter_folder(tmp_path / name, name.encode()))) for name in "ab")
    assert adapters.of_request(a) is not None
    assert adapters.of_request(adapter_of(b.lora_path, 2)) is None
    assert tally.totals() == {"adapters_unknown": 1}
    assert "too many adapters" in caplog.text
    assert adapters.weights(b) is None
    assert adapters.weights(a) is None, "vLLM may have read the other folder under this number"


def test_adapters_replaced_beyond_the_bound_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvclient.engines.vllm.identity.adapters._MOST_ADAPTERS", 1)
    adapters = Adapters(ConnectorCounters())
    a, b = (str(adapter_folder(tmp_path / name, name.encode())) for name in "ab")
    assert digest_in(adapters, a) is not None
    for number in range(1, 10):
        adapters.end_replacement(adapter_of(b, number), adapters.begin_replacement(adapter_of(b, number)))
        assert digest_in(adapters, b, number) is None
        assert digest_in(adapters, a, number) is None
    assert adapters.known == 2


def test_adapter_number_of_two_folders_spoils_both(tmp_path: Path) -> None:
    """vLLM may have read the second folder, so its prefix cache may have KV of that one under the first folder's name."""
    adapters = Adapters(ConnectorCounters())
    assert digest_in(adapters, adapter_folder(tmp_path / "a")) is not None
    assert digest_in(adapters, adapter_folder(tmp_path / "b", b"two")) is None
    assert digest_in(adapters, tmp_path / "a") is None
    assert digest_in(adapters, tmp_path / "a", 2) is None


def test_adapter_replaced_by_a_request_is_not_shared(tmp_path: Path) -> None:
    """A request of vLLM's offline API may replace an adapter. No event shows when vLLM reads it."""
    adapters = Adapters(ConnectorCounters())
    a, b = (adapter_of(str(adapter_folder(tmp_path / name, name.encode()))) for name in "ab")
    assert adapters.weights(a) is not None
    b.load_inplace = True
    assert adapters.weights(b) is None
    assert digest_in(adapters, tmp_path / "a", 2) is None, "running requests of the old one continue with the new weights"


def test_adapter_replaced_from_another_folder_is_known(tmp_path: Path) -> None:
    """The KV that running requests compute from then on is in vLLM's prefix cache under the old path."""
    adapters = Adapters(ConnectorCounters())
    a, b = (adapter_of(str(adapter_folder(tmp_path / name, name.encode()))) for name in "ab")
    before = adapters.weights(a)
    assert before is not None
    assert adapters.holds(a, before)
    read = adapters.begin_replacement(b)
    assert read is not None
    assert adapters.weights(b) is None, "vLLM has not read it yet"
    adapters.end_replacement(b, read)
    assert adapters.weights(b) is read
    assert adapters.holds(b, read)
    assert not adapters.holds(a, before)
    assert adapters.weights(a) is None
    assert digest_in(adapters, tmp_path / "a", 2) is None, "nor by another number"
    assert adapters.weights(b) is read, "which the new one does not suffer from"


def test_adapter_replacement_failed_leaves_number_unknown(tmp_path: Path) -> None:
    adapters = Adapters(ConnectorCounters())
    a, b = (adapter_of(str(adapter_folder(tmp_path / name, name.encode()))) for name in "ab")
    adapters.weights(a)
    adapters.begin_replacement(b)
    assert (adapters.weights(a), adapters.weights(b)) == (None, None)
    changed = adapters.begin_replacement(b)
    adapter_folder(tmp_path / "b", b"later")
    adapters.end_replacement(b, changed)
    assert adapters.weights(b) is None, "vLLM may have read either files"


@pytest.mark.parametrize("spoil", ["missing", "a hub's name", "unreadable", "no config", "blind"])
def test_adapter_without_digest_is_not_shared(spoil: str, tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "a")
    adapters = Adapters(ConnectorCounters())
    path = {"missing": str(tmp_path / "b"), "a hub's name": "somebody/something"}.get(spoil, str(folder))
    if spoil == "unreadable":
        (folder / "adapter_model.safetensors").unlink()
        (folder / "adapter_model.safetensors").mkdir()
    if spoil == "no config":
        (folder / "adapter_config.json").unlink()
    adapters.blind = spoil == "blind"
    weights = adapters.of_request(adapter_of(path))
    assert weights is None
    assert not is_hashable(asks(lora_request=adapter_of(path)), weights)


def test_extras_contain_adapters_salts_and_images() -> None:
    adapter, weights = adapter_of("/p"), AdapterWeights("/p", (), "w")
    extras = request_extras(
        asks(lora_request=adapter, cache_salt="s", mm_features=[image(6, 4, "x"), image(10, 1, "y")]), weights, 4
    )
    assert sorted(extras) == [0, 1, 2]
    assert extras[0] == encode_extra([("lora", b"n"), ("lora-path", b"/p"), ("lora-weights", b"w"), ("salt", b"s")])
    assert extras[1] != extras[2], "the same image at another place of its block"
    assert request_extras(asks(mm_features=[image(6, 2, "x")]), None, 4) != request_extras(
        asks(mm_features=[image(7, 1, "x")]), None, 4
    )
    assert request_extras(asks(), None, 4) == {}


@pytest.mark.parametrize(
    ("drafts", "asynchronous", "kept"), [(None, False, False), (object(), True, False), (object(), False, True)]
)
def test_drafts_are_kept_by_synchronous_scheduling(drafts: object, asynchronous: bool, kept: bool) -> None:
    scheduler = SimpleNamespace(async_scheduling=asynchronous)
    assert keeps_drafts(SimpleNamespace(speculative_config=drafts, scheduler_config=scheduler)) is kept


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "named"), [(0, False, False), (0.0, None, False), (0, True, True), (4, False, True)]
)
def test_media_without_caches_are_not_named(cache_gb: float, prefix_caching: bool | None, named: bool) -> None:
    model = SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb))
    config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching))
    assert are_media_named(config) is named
    model.multimodal_config = None
    assert are_media_named(config)


@given(st.binary(min_size=16, max_size=16), st.lists(st.binary(min_size=16, max_size=16), max_size=9))
def test_key_mask_is_a_bijection(namespace: bytes, keys: list[bytes]) -> None:
    chain = SPEC.namespace
    masked = NamespaceKeyMask(chain, namespace).keys(keys)  # type: ignore[arg-type]
    again = [masked[at : at + 16] for at in range(0, len(masked), 16)]
    assert NamespaceKeyMask(namespace, chain).keys(again) == b"".join(keys)  # type: ignore[arg-type]
    assert NamespaceKeyMask(chain, chain).keys(keys) == b"".join(keys)  # type: ignore[arg-type]
    assert namespace == chain or all(one != other for one, other in zip(again, keys, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_page_is_bytes_of_tensor_at_its_block(dtype: torch.dtype) -> None:
    cache = torch.arange(3 * 5 * 2 * 4 * 8).to(dtype).reshape(3, 5, 2, 4, 8)  # layer-major: 3 layers of 5 pages
    pages = GroupPages(list(cache), 5)
    buffer = pages.buffer([4, 1])
    assert isinstance(buffer, BlockBuffer)
    assert (buffer.count, buffer.shape.layers, buffer.shape.layer_block_bytes) == (2, 3, 2 * 4 * 8 * dtype.itemsize)
    for at, page in enumerate([4, 1]):
        for layer in range(3):
            (piece,) = buffer.segments(at, layer, 1)
            assert bytes(piece) == cache[layer, page].contiguous().view(torch.uint8).numpy().tobytes()
            piece[:] = bytes([7]) * len(piece)
            assert (cache[layer, page].view(torch.uint8) == 7).all()
    assert [len(piece) for piece in buffer.segments(0, 0, 3)] == [buffer.shape.layer_block_bytes] * 3


def test_pages_of_block_major_caches_and_kernel_blocks() -> None:
    cache = torch.arange(5 * 3 * 2 * 4 * 8, dtype=torch.int32).reshape(5, 3, 2, 4, 8)  # block-major
    pages = GroupPages([cache[:, layer] for layer in range(3)], 5)
    assert bytes(pages.buffer([2]).segments(0, 1, 1)[0]) == cache[2, 1].numpy().tobytes()
    kernel = torch.arange(10 * 2 * 4 * 8, dtype=torch.int32).reshape(10, 2, 4, 8)  # two pages of the kernel in each
    halves = GroupPages([kernel], 5)
    assert bytes(halves.buffer([3]).segments(0, 0, 1)[0]) == kernel[6:8].numpy().tobytes()


def test_page_of_permuted_axes_is_copied_in_memory_order() -> None:
    memory = torch.arange(5 * 4 * 2 * 8, dtype=torch.int32).reshape(5, 4, 2, 8)  # [block, token, head, content]
    cache = memory.transpose(1, 2)
    assert page_order(cache) == (1, 0, 2)
    assert page_order(memory) == (0, 1, 2)
    assert page_order(memory[:, :, :1].transpose(1, 2)) == (0, 1, 2), "where an axis of one lies says nothing"
    assert bytes(GroupPages([cache], 5).buffer([3]).segments(0, 0, 1)[0]) == memory[3].numpy().tobytes()
    assert group_spec(HookOptions(), replace(FACTS, page_order=(1, 0, 2))).namespace != group_spec(HookOptions(), FACTS).namespace


@pytest.mark.parametrize(
    ("tensors", "blocks"),
    [
        ([torch.zeros(5, 4, 16)[:, :, ::2]], 5),
        ([torch.zeros(5, 4, 16)[:, :, :8]], 5),
        ([torch.zeros(5, 4, 8).transpose(0, 1)], 4),
        ([torch.zeros(10, 3, 4, 8)[:, 1]], 5),
        ([torch.zeros(5, 4, 8), torch.zeros(5, 4, 4)], 5),
        ([torch.zeros(5, 4, 8)], 4),
        ([torch.zeros(5, 4, 8)], 0),
        ([torch.zeros(5, 4, 8, device="meta")], 5),
    ],
)
def test_pages_unsupported_memory_is_rejected(tensors: list[Any], blocks: int) -> None:
    with pytest.raises(InvalidArgument):
        GroupPages(tensors, blocks)


@pytest.mark.parametrize("ids", [[5], [-1], [0, 9]])
def test_page_id_out_of_range_is_rejected(ids: list[int]) -> None:
    with pytest.raises(InvalidArgument):
        GroupPages([torch.zeros(5, 4, 8)], 5).buffer(ids)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"model_digest": "e"},
        {"dtype": "bfloat16"},
        {"block_tokens": 8},
        {"layers": ("a", "c")},
        {"page_bytes": 32},
        {"page_shape": (4, 2, 2)},
        {"kind": "sliding:96"},
        {"backend": "CPU_MLA"},
        {"isa": "amx"},
        {"engine": "0.33"},
        {"shard_count": 2},
        {"shard_count": 2, "shard_rank": 1},
    ],
)
def test_namespace_depends_on_all_that_changes_bytes(other: dict[str, Any]) -> None:
    options = HookOptions()
    assert group_spec(options, FACTS).namespace == group_spec(options, replace(FACTS)).namespace
    assert group_spec(options, replace(FACTS, **other)).namespace != group_spec(options, FACTS).namespace


def test_namespace_depends_on_epoch_tenant_and_salt() -> None:
    names = {
        group_spec(HookOptions(**choice), FACTS).namespace
        for choice in (
            {},
            {"weights_epoch": "1"},
            {"tenant": "t"},
            {"salt": "s"},
            {"model": "n"},
            {"hash_algorithm": "sha256-128"},
        )
    }
    assert len(names) == 6


def test_ranks_share_one_chain() -> None:
    ranks = [group_spec(HookOptions(), replace(FACTS, shard_count=2, shard_rank=rank)) for rank in range(2)]
    assert chain_spec([ranks[0]]) == chain_spec([ranks[1]])


@pytest.mark.parametrize(
    "given_options",
    [
        {"load_mode": "eager"},
        {"lookup_wait_ms": -1},
        {"lookup_wait_ms": float("nan")},
        {"pinned_share": 2},
        {"pinned_share": True},
        {"min_load_tokens": -1},
        {"min_load_tokens": 1.5},
        {"device_copies": "fast"},
        {"device_staging_bytes": 0},
        {"device_gds": "on"},
        {"device_gds_bytes": 0},
        {"device_pin_wait_s": -1},
        {"weights_epoch_file": 3},
        {"weights_epoch_file": "f", "weights_epoch": "1"},
        {"lod_mode": "async"},
        {"load_deadline_s": 0},
    ],
)
def test_options_invalid_values_are_rejected(given_options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        ConnectorOptions.from_mapping(given_options)


def test_options_of_both_kinds_are_accepted() -> None:
    options = ConnectorOptions.from_mapping({"load_mode": "layerwise", "tenant": "t", "min_load_tokens": 64})
    assert (options.load_mode, options.hook.tenant, options.min_load_tokens) == ("layerwise", "t", 64)
    options.check_groups(1, 1)


@pytest.mark.parametrize(
    "way",
    [{"async_scheduling": True}, {"pipeline_parallel_size": 2}, {"speculative_config": object()}],
    ids=lambda way: next(iter(way)),
)
def test_layerwise_loads_with_overlapping_steps_are_rejected(way: dict[str, Any]) -> None:
    def engine(**fields: Any) -> SimpleNamespace:
        return SimpleNamespace(
            scheduler_config=SimpleNamespace(async_scheduling=fields.get("async_scheduling", False)),
            parallel_config=SimpleNamespace(pipeline_parallel_size=fields.get("pipeline_parallel_size", 1)),
            speculative_config=fields.get("speculative_config"),
        )

    check_steps(engine())
    with pytest.raises(InvalidArgument, match="load_mode async"):
        check_steps(engine(**way))


def test_external_launcher_of_several_workers_is_refused() -> None:
    for backend, workers in (("mp", 2), ("external_launcher", 1)):
        check_launcher(SimpleNamespace(distributed_executor_backend=backend, world_size=workers))
    with pytest.raises(InvalidArgument, match="mp or ray"):
        check_launcher(SimpleNamespace(distributed_executor_backend="external_launcher", world_size=2))


def test_weights_digest_changes_with_weights(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
        (tmp_path / name / "model.safetensors").write_bytes(np.random.default_rng(1).bytes(3 << 20))
    assert sampled_digest(tmp_path / "a") == sampled_digest(tmp_path / "b") != ""
    assert sampled_digest(tmp_path / "a" / "model.safetensors") == sampled_digest(tmp_path / "a")
    changed = np.frombuffer((tmp_path / "b" / "model.safetensors").read_bytes(), np.uint8).copy()
    changed[2 << 20 :: 4096] ^= 1
    (tmp_path / "b" / "model.safetensors").write_bytes(changed.tobytes())
    assert sampled_digest(tmp_path / "a") != sampled_digest(tmp_path / "b")
    assert sampled_digest(tmp_path / "nothing") == ""


def test_weights_digest_sees_small_tensor_of_large_file(tmp_path: Path) -> None:
    """Norms between large tensors, which samples of the file do not reach."""
    large, norm = 40 << 20, 512
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "U8", "shape": [large], "data_offsets": [0, large]},
            "norm": {"dtype": "U8", "shape": [norm], "data_offsets": [large, large + norm]},
            "b": {"dtype": "U8", "shape": [large], "data_offsets": [large + norm, 2 * large + norm]},
        }
    ).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * large + norm)
    before = sampled_digest(tmp_path)
    with path.open("r+b") as file:
        file.seek(8 + len(header) + large + 7)
        file.write(b"x")
    assert sampled_digest(tmp_path) != before


@pytest.mark.parametrize(
    "header", [b"[]", b"{", b'{"a": 7}', b'{"a": {"data_offsets": [5, 1]}}', b'{"a": {"data_offsets": ["x"]}}']
)
def test_weights_digest_malformed_header_is_sampled(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(65 << 20)
    assert sampled_digest(tmp_path)


MEAN = SimpleNamespace(seq_pooling_type="MEAN", tok_pooling_type=None)


@pytest.mark.parametrize(
    ("attention", "pooler", "prefixes", "backend", "refused"),
    [
        ("decoder", None, True, "CPU_ATTN", ""),
        ("decoder", None, True, "CPU_MLA", "attention backend CPU_MLA"),
        ("attention_free", None, False, "MAMBA2", ""),
        ("attention_free", MEAN, False, "MAMBA2", "a model of kind attention_free, pooling MEAN,"),
        ("decoder", MEAN, False, "CPU_ATTN", "a model of kind decoder, pooling MEAN,"),
        ("encoder_decoder", None, False, "CPU_ATTN", "a model of kind encoder_decoder, pooling none,"),
    ],
)
def test_whole_prompts_only_names_backend_or_pooling(
    attention: str, pooler: Any, prefixes: bool, backend: str, refused: str
) -> None:
    model = SimpleNamespace(attn_type=attention, pooler_config=pooler, is_prefix_caching_supported=prefixes)
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
    compiled = SimpleNamespace(static_forward_context={"layer": layer})
    config = SimpleNamespace(model_config=model, compilation_config=compiled)
    assert whole_prompts_only(config, [GroupView(("layer",), 32, "", "")]) == refused


def test_model_digest_depends_on_length_if_rope_does() -> None:
    def digest_of(rope: dict[str, Any], length: int) -> str:
        config = SimpleNamespace(to_dict=lambda: {"text_config": {"rope_parameters": rope}}, _commit_hash="c")
        model = SimpleNamespace(hf_config=config, revision=None, quantization=None, dtype="f", max_model_len=length)
        return model_digest(model, SimpleNamespace(cache_dtype="auto"), "")

    assert digest_of({"rope_type": "longrope"}, 4096) != digest_of({"rope_type": "longrope"}, 8192)
    assert digest_of({"full": {"rope_type": "new kind"}}, 4096) != digest_of({"full": {"rope_type": "new kind"}}, 8192)
    assert digest_of({"rope_type": "llama3"}, 4096) == digest_of({"rope_type": "llama3"}, 8192)


def test_model_digest_depends_on_preparation_of_images(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"

    def digest_of(content: str = "", **options: Any) -> str:
        scales.write_text(content)
        config = SimpleNamespace(to_dict=dict)
        media = SimpleNamespace(**options)
        model = SimpleNamespace(hf_config=config, quantization=None, dtype="f", max_model_len=1, multimodal_config=media)
        return model_digest(model, SimpleNamespace(cache_dtype="auto"), "")

    engines: list[dict[str, Any]] = [
        {},
        {"mm_processor_kwargs": {"max_pixels": 1}},
        {"mm_processor_kwargs": {"max_pixels": 2}},
        {"media_io_kwargs": {"video": {"num_frames": 40}}},
        {"video_pruning_rate": 0.5},
        {"mm_encoder_attn_dtype": "fp8"},
        {"mm_encoder_fp8_scale_path": str(scales), "content": "1"},
        {"mm_encoder_fp8_scale_path": str(scales), "content": "2"},
    ]
    assert len({digest_of(**engine) for engine in engines}) == len(engines)
    assert digest_of(skip_mm_profiling=True) == digest_of()


def engine_of(folder: Path, load_format: str = "auto", **fields: Any) -> Any:
    """vLLM's description of an engine that starts now with the model in a folder."""
    mark_engine_start()
    model = {
        "model": str(folder),
        "model_weights": "",
        "revision": None,
        "hf_config": SimpleNamespace(),
        "trust_remote_code": False,
        "is_multimodal_model": False,
    }
    load = {"load_format": load_format, "model_loader_extra_config": {}, "download_dir": None}
    for name, value in fields.items():
        (model if name in model else load)[name] = value
    return SimpleNamespace(model_config=SimpleNamespace(**model), load_config=SimpleNamespace(**load))


@pytest.mark.parametrize("error", [AssertionError("kernel"), ValueError("kernel"), KeyError("kernel"), RuntimeError("kernel")])
def test_weights_unreadable_get_a_name_of_their_own(error: Exception) -> None:
    """A layer's kernel refuses the vectors that read its weights: no reason to end the engine."""

    class Runner:
        def get_model(self) -> None:
            raise error

    runner = Runner()
    weights = ModelWeights(runner, torch.bfloat16)
    names = {weights.digest() for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith("unique:") for name in names)


def test_files_text_named_weights_differs_by_load_options(tmp_path: Path) -> None:
    """Of the engines with the same ``weights_epoch``, one uses ``--load-format dummy``."""
    engines = [
        engine_of(tmp_path),
        engine_of(tmp_path, "dummy"),
        engine_of(tmp_path, "sharded_state"),
        engine_of(tmp_path, "sharded_state", model_loader_extra_config={"pattern": "x"}),
        engine_of(tmp_path, revision="other"),
    ]
    assert len({files_text(engine, named=True) for engine in engines}) == len(engines)
    assert files_text(engines[1], named=True) == files_text(engines[1], named=True)
    assert {files_text(engine, named=False) for engine in engines} == {""}, "the weights in memory tell"


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", ["trust_remote_code", "is_multimodal_model"])
def test_files_text_own_code_or_images_depends_on_lists(tmp_path: Path, kind: str, named: bool) -> None:
    def text() -> str:
        return files_text(engine_of(tmp_path, **{kind: True}), named=named)

    (tmp_path / "modeling_own.py").write_text("old")
    old = text()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert text() == old
    (tmp_path / "modeling_own.py").write_text("new")
    engine = engine_of(tmp_path, **{kind: True})
    new = files_text(engine, named=named)
    assert new == files_text(engine, named=named) != old
    (tmp_path / "modeling_own.py").write_text("old")  # perhaps after the engine read it
    assert files_text(engine, named=named) not in {old, new}


@given(st.lists(st.dictionaries(st.integers(0, 5), st.booleans()), max_size=5))
def test_worker_output_merges_in_any_order(workers: list[dict[int, bool]]) -> None:
    def merged(order: list[dict[int, bool]]) -> WorkerOutput:
        total = WorkerOutput()
        for worker in order:
            total.merge(WorkerOutput(dict.fromkeys(worker, 1), {job for job, good in worker.items() if not good}))
        return total

    assert merged(workers) == merged(workers[::-1])
    assert sum(merged(workers).stores_done.values()) == sum(map(len, workers))


def test_counters_take_returns_each_count_once() -> None:
    tally = ConnectorCounters()
    tally.add("loads")
    tally.add("load_bytes", 5)
    assert tally.take() == {"loads": 1, "load_bytes": 5}
    assert tally.take() == {}
    tally.add("loads", 2)
    assert tally.totals() == {"loads": 3, "load_bytes": 5}
    with pytest.raises(AssertionError):
        tally.add("nonsense")


def test_facts_with_numpy_integers_become_plain() -> None:
    """Page shapes come from torch as integers; a namespace must not depend on their type."""
    shape = tuple(np.int64(one) for one in FACTS.page_shape)
    assert group_spec(HookOptions(), replace(FACTS, page_shape=shape)).namespace == group_spec(HookOptions(), FACTS).namespace  # type: ignore[arg-type]
