"""SGLang's whole engine on a CPU: served processes with HiCache whose third tier is the store, compared with SGLang alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from kvstore.lab.engine_bed import EngineBed, ServedEngine
from kvstore.lab.sglang_engine import SGLangAnswer, SGLangSpec, flush_cache, generate, hicache_store
from kvstore.testing.connector.faulty_store import NODE, FaultyStore
from kvstore.testing.tiny_models import make_model

PAGE = 16
ANSWER_TOKENS = 16
STORED_S = 30.0
PROMPTS = [[(7 * at + 13 * seed) % 90 + 33 for at in range(tokens)] for seed, tokens in enumerate((700, 300, 40))]
WHOLE_PAGES = [(len(prompt) - 1) // PAGE * PAGE for prompt in PROMPTS]

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(400)]


@dataclass(frozen=True)
class Served:
    """Two engines with one store, after one stored all prompts, and the answers of SGLang alone."""

    writer: ServedEngine
    reader: ServedEngine
    store: FaultyStore
    right: list[tuple[int, ...]]
    cold: list[SGLangAnswer]
    warm: list[SGLangAnswer]


def ask(engine: ServedEngine) -> list[SGLangAnswer]:
    return [generate(engine, prompt, ANSWER_TOKENS) for prompt in PROMPTS]


def tokens_of(answers: list[SGLangAnswer]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


def stored_of(answers: list[SGLangAnswer]) -> list[int]:
    return [answer.stored_tokens for answer in answers]


def await_stored(engine: ServedEngine) -> None:
    """Wait until an engine that forgets its caches finds all prompts in the store."""
    ends_s = time.monotonic() + STORED_S
    found: list[int] = []
    while found != WHOLE_PAGES:
        assert time.monotonic() < ends_s, f"the store has {found} of {WHOLE_PAGES} tokens: {engine.log()[-4_000:]}"
        time.sleep(0.2)
        flush_cache(engine)
        found = stored_of(ask(engine))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = make_model(folder / "model")
    with FaultyStore(folder / "store") as store, EngineBed(folder / "logs") as bed:

        def spec(name: str, **options: object) -> SGLangSpec:
            address = store.address
            return SGLangSpec(name, model, hicache_store(address.metadata, address.node, **options), block_tokens=PAGE)

        alone = bed.start(SGLangSpec("alone", model, block_tokens=PAGE), spec("writer", verify="never"))
        writer = bed.engine("writer")
        right, cold = tokens_of(ask(alone)), ask(writer)
        bed.kill("alone")
        await_stored(writer)
        reader = bed.start(spec("reader", verify="always"))
        yield Served(writer, reader, store, right, cold, warm=ask(reader))


def test_engine_with_empty_store_same_tokens(served: Served) -> None:
    assert tokens_of(served.cold) == served.right
    assert [answer.cached_tokens for answer in served.cold] == [0, 0, 0]


def test_second_engine_loads_prompts_same_tokens(served: Served) -> None:
    assert tokens_of(served.warm) == served.right
    assert stored_of(served.warm) == WHOLE_PAGES


def test_wrong_bytes_unchecked_change_engine_tokens(served: Served) -> None:
    """The negative control, and after it the same bytes with checksums: found out, and computed."""
    served.store.roll_memory()
    flush_cache(served.writer)
    wrong = ask(served.writer)
    assert stored_of(wrong) == WHOLE_PAGES
    assert all(one != right for one, right in zip(tokens_of(wrong), served.right, strict=True))
    flush_cache(served.reader)
    checked = ask(served.reader)
    assert stored_of(checked) == [0, 0, 0]
    assert tokens_of(checked) == served.right


def test_node_killed_engine_computes_same_tokens(served: Served) -> None:
    served.store.cluster.kill(NODE)
    flush_cache(served.reader)
    assert tokens_of(ask(served.reader)) == served.right


# ---- what keeps SGLang from running like this without the bed: noticed once a newer SGLang changes it ----
def test_sglang_pins_host_pools_with_cuda_on_a_cpu() -> None:
    """Without the bed's patches HiCache does not start on a CPU: its host pools are registered with CUDA."""
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS, HostTensorAllocator

    allocate: Callable[..., torch.Tensor] = ALLOC_MEMORY_FUNCS["cpu"]
    with pytest.raises(AssertionError, match="CUDA"):
        allocate((PAGE, 4), torch.float32, "cpu", True, HostTensorAllocator())


def test_sglang_has_no_transfer_backend_of_others() -> None:
    """Prefill and decode: SGLang's backends are an enumeration, and its one backend without a network refuses to prefill."""
    from sglang.srt.disaggregation.utils import TransferBackend

    assert {backend.value for backend in TransferBackend} == {"mooncake", "mori", "nixl", "ascend", "fake"}
    with pytest.raises(ValueError, match="kvstore"):
        TransferBackend("kvstore")
