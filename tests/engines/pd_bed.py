"""A prefill engine and a decode engine (served vLLMs, each with its own node) and a storage node, for prefill/decode tests."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from adapters_bed import merge_adapter
from transformers import AutoModelForCausalLM

from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.lab.engine_bed import EngineBed, ServedEngine, ServeSpec, store_transfer, token_ids_of
from kvstore.testing.tiny_models import PAD
from support.node_stats import evict, flush

STORAGE, PREFILL, DECODE = "storage-0", "prefill-0", "decode-0"
BLOCK = 32
PROMPT_DEADLINE_S = 10.0
HANDOFF_DEADLINE_S = 5.0
"""Busy cores keep both deadlines; tests of prompts that never arrive wait for them."""
MIB = 1 << 20


def text(seed: object, tokens: int) -> list[int]:
    """Printable token ids, different for each seed."""
    return random.Random(repr(seed)).choices(range(32, 127), k=tokens)


def transfer_id() -> str:
    return uuid.uuid4().hex


def for_prefill(transfer: str, node: str = DECODE) -> dict[str, Any]:
    return {"do_remote_decode": True, "transfer_id": transfer, "decode_node": node}


def for_decode(transfer: str) -> dict[str, Any]:
    return {"do_remote_prefill": True, "transfer_id": transfer}


@dataclass
class PdBed:
    """The processes, and how requests go through them."""

    cluster: LocalCluster
    engines: EngineBed
    model: Path
    options: dict[str, object] = field(default_factory=dict)
    serve: dict[str, Any] = field(default_factory=dict)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(32))

    def spec(self, name: str) -> ServeSpec:
        role = {PREFILL: "kv_producer", DECODE: "kv_consumer"}[name]
        options: dict[str, object] = {
            "prompt_deadline_s": PROMPT_DEADLINE_S,
            "handoff_deadline_s": HANDOFF_DEADLINE_S,
            "path_policy": "round_robin",
            **self.options,
        }
        node = self.cluster.node(name).local_socket
        store = store_transfer(self.cluster.metadata_address, node, role=role, **options)
        return ServeSpec(name, self.model, store=store, core=int(role == "kv_consumer"), block_tokens=BLOCK, **self.serve)

    @property
    def prefill(self) -> ServedEngine:
        return self.engines.engine(PREFILL)

    @property
    def decode(self) -> ServedEngine:
        return self.engines.engine(DECODE)

    def begin(self, prompt: Sequence[int], max_tokens: int, transfer: str, **how: Any) -> tuple[Future[Any], Future[Any]]:
        """Asks both engines at once."""
        first = self.pool.submit(self.prefill.complete, prompt, 1, kv_transfer_params=for_prefill(transfer))
        second = self.pool.submit(self.decode.complete, prompt, max_tokens, kv_transfer_params=for_decode(transfer), **how)
        return first, second

    def ask(self, prompt: Sequence[int], max_tokens: int = 16) -> list[int]:
        """Through both; the answer's tokens."""
        first, second = self.begin(prompt, max_tokens, transfer_id())
        assert len(token_ids_of(first.result())) == 1
        return token_ids_of(second.result())

    def counts(self, engine: ServedEngine) -> dict[str, int]:
        """The connector's counters."""
        found = engine.metrics().items()
        return {
            name.removeprefix("vllm:kvstore_").removesuffix("_total"): round(value)
            for name, value in found
            if name.startswith("vllm:kvstore_") and name.endswith("_total")
        }

    def only_in_storage(self) -> None:
        """Make all blocks durable, and remove them from the memory of hosts and engines."""
        for engine in self.engines:
            engine.reset_prefix_cache()
        for name in (PREFILL, DECODE, STORAGE):
            assert flush(self.cluster, name, 20.0)
        for name in (PREFILL, DECODE, STORAGE):
            evict(self.cluster, name)


@contextmanager
def pd_bed(
    folder: Path, model: Path, *, decode_buffer: str = "16MiB", serve: Mapping[str, Any] = {}, **options: object
) -> Iterator[PdBed]:
    """All of it, started.

    Args:
        folder: for data and logs.
        model: that both serve.
        decode_buffer: of the decode host's node.
        serve: further fields of ``ServeSpec``.
        options: of the connector.
    """
    nodes = [
        NodeSpec(STORAGE, ("storage",), dram_bytes=128 * MIB, nvme_bytes=256 * MIB),
        NodeSpec(PREFILL, ("prefill",), dram_bytes=128 * MIB, write_back_to=STORAGE),
        NodeSpec(DECODE, ("decode",), dram_bytes=256 * MIB, write_back_to=STORAGE, settings=(("decode_buffer", decode_buffer),)),
    ]
    with LocalCluster(nodes, folder / "store") as cluster, EngineBed(folder / "engines") as engines:
        bed = PdBed(cluster, engines, model, options, dict(serve))
        engines.start(bed.spec(PREFILL), bed.spec(DECODE))
        yield bed


class Oracle:
    """Return the answer of transformers, without engine and store.

    Args:
        model: its folder.
        adapter: that of an adapter of it; None: without.
    """

    def __init__(self, model: Path, adapter: Path | None = None) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(model).eval()
        if adapter is not None:
            merge_adapter(self._model, adapter)
        self._answers: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def says(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        request = tuple(prompt), max_tokens
        if request not in self._answers:
            ids = torch.tensor([list(prompt)])
            answer = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=PAD,
            )
            self._answers[request] = answer[0, ids.shape[1] :].tolist()
        return self._answers[request]
