"""KV that vLLM stored is continued by transformers, with the tokens that vLLM says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from generate_bed import greedy, prompt
from transformers import AutoModelForCausalLM, DynamicCache

from kvclient import InvalidArgument
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.unpack import PageReader, find_pages
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.testing.tiny_models import TinyModel, make_model

MODEL, TOKENS, STEPS, BLOCK = "tiny llama", 300, 24, 32


def test_vllm_prefills_and_transformers_goes_on(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", TinyModel(hidden=128, max_tokens=1024))
    ids = prompt(70, TOKENS)
    with LocalCluster([NodeSpec("n", dram_bytes=64 << 20)], tmp_path / "store") as cluster:
        addresses = {"metadata": cluster.metadata_address, "node": cluster.node("n").local_socket}
        answer = said_by_vllm(folder, ids[0].tolist(), {**addresses, "model": MODEL})
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        computed = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, past_key_values=computed, use_cache=True)

        spec = find_pages(addresses["metadata"], model=MODEL)
        with PageReader(spec, HookOptions(**addresses)) as reader:
            layers, tokens = reader.read(ids[0].tolist(), most=TOKENS - 1)
            assert reader.read(prompt(71, TOKENS)[0].tolist()) == ([], 0)
            assert reader.read(ids[0].tolist(), most=BLOCK - 1) == ([], 0)
        assert tokens == TOKENS // BLOCK * BLOCK
        for (keys, values), own in zip(layers, computed.layers, strict=True):
            torch.testing.assert_close(keys, own.keys[:, :, :tokens], atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(values, own.values[:, :, :tokens], atol=1e-3, rtol=1e-3)
        assert greedy(model, ids) == [answer]
        assert greedy(model, ids, past_key_values=DynamicCache(layers)) == [answer]
        rolled = [(keys.roll(3, 2), values) for keys, values in layers]
        assert greedy(model, ids, past_key_values=DynamicCache(rolled)) != [answer]
        for wrong in ({"model": "another"}, {"model": MODEL, "tenant": "another"}, {"model": MODEL, "weights_epoch": "another"}):
            with pytest.raises(InvalidArgument):
                find_pages(addresses["metadata"], **wrong)


def said_by_vllm(folder: Path, ids: list[int], options: dict[str, Any]) -> list[int]:
    """Greedy tokens of vLLM, which stores the KV."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    engine = LLM(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=2,
        block_size=BLOCK,
        seed=0,
        kv_cache_memory_bytes=64 << 20,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="kvclient.engines.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config=options,
        ),
    )
    answer = engine.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True))
    engine.llm_engine.engine_core.shutdown()  # stores what is not stored yet
    return list(answer[0].outputs[0].token_ids)
