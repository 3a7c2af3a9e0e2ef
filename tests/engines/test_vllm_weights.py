"""KV is of the weights that made it: engines whose weights did not come from the same files share none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from adapters_bed import make_adapter
from vllm_bed import VllmDriver, VllmEngine, text, tiny

from kvclient.engines.stamps import engine_starts
from kvclient.engines.weights import WeightsSource
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.lab.tiny_models import Family, TinyModel, make_model
from kvstore.testing.connector.driver import StoreAddress

MIB = 1 << 20
PROMPTS = [text(seed, 400) for seed in range(2)]
LORA = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def driver(model_folder: Path) -> VllmDriver:
    return VllmDriver(tiny("llama", model_folder))


@pytest.fixture(scope="module")
def right(driver: VllmDriver) -> list[tuple[int, ...]]:
    """What the model says without a store."""
    alone = driver.open(None)
    try:
        return alone.tokens(PROMPTS)
    finally:
        alone.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreAddress]:
    with LocalCluster([NodeSpec("n", dram_bytes=64 * MIB)], tmp_path / "store") as cluster:
        yield StoreAddress(cluster.metadata_address, cluster.node("n").local_socket)


def loaded(answers: Sequence[Any]) -> list[int]:
    return [one.loaded_tokens for one in answers]


@pytest.mark.parametrize("options", [{}, {"weights_epoch": "named"}], ids=["unnamed", "named"])
def test_weights_that_were_made_up_are_nobody_elses(
    options: dict[str, str], right: list[tuple[int, ...]], driver: VllmDriver, store: StoreAddress
) -> None:
    """``--load-format dummy`` before the folder of the real weights."""
    dummy = driver.open(store, options, load_format="dummy")
    assert dummy.tokens(PROMPTS) != right
    dummy.forget()
    assert all(loaded(dummy.generate(PROMPTS, 12))), "its own it finds"
    assert dummy.flush()
    dummy.close()
    engine = driver.open(store, options)
    answers = engine.generate(PROMPTS, 12)
    engine.close()
    assert ([one.tokens for one in answers], loaded(answers)) == (right, [0, 0])


@pytest.mark.parametrize("how", ["written", "renamed", "folders swapped"])
def test_weights_that_were_replaced_once_they_were_read_are_nobody_elses(
    how: str, driver: VllmDriver, store: StoreAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with the old weights looks at the new ones: its KV must not be taken for theirs."""
    from replacing_connector import FOLDER, HOW, OTHERS

    others = VllmDriver(
        make_model(tmp_path / "others", TinyModel(Family.LLAMA, hidden=128, head_dim=32, max_tokens=4096, seed=7))
    )
    folder = shutil.copytree(driver.model, tmp_path / "model")
    alone = others.open(None)
    right = alone.tokens(PROMPTS)
    alone.close()
    replacing = VllmDriver(folder, connector="ReplacingConnector", module="replacing_connector")
    for name, value in ((FOLDER, folder), (OTHERS, others.model), (HOW, how)):
        monkeypatch.setenv(name, str(value))
    torn = replacing.open(store)
    assert torn.tokens(PROMPTS) != right, "it has the old ones"
    assert torn.flush()
    torn.close()
    engine = VllmDriver(folder).open(store)
    answers = engine.generate(PROMPTS, 12)
    engine.forget()
    again = engine.generate(PROMPTS, 12)
    engine.close()
    assert ([one.tokens for one in answers], loaded(answers)) == (right, [0, 0])
    assert all(loaded(again)), "from the next start on they are shared"


def ask(engine: VllmEngine, adapter: Any, prompts: Sequence[Sequence[int]] = PROMPTS) -> tuple[list[tuple[int, ...]], list[int]]:
    """Answers under an adapter, and how much of each prompt came from the store."""
    from vllm import SamplingParams

    engine._loaded.clear()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    answers = engine.llm.generate(asked, params, use_tqdm=False, lora_request=adapter)
    came = {name.rsplit("-", 1)[0]: tokens for name, tokens in engine._loaded.items()}
    return [tuple(one.outputs[0].token_ids) for one in answers], [came.get(one.request_id, 0) for one in answers]


def test_an_adapter_that_was_read_anew_is_another(driver: VllmDriver, store: StoreAddress, tmp_path: Path) -> None:
    """Its files change while it is evicted among others: vLLM reads the new ones, and what they compute is not the old ones'."""
    from vllm.lora.request import LoRARequest

    folders = [tmp_path / name for name in ("a", "b", "c")]
    for seed, folder in enumerate(folders):
        make_adapter(driver.model, folder, seed)
    first, other, early = (LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, 1))
    alone = driver.open(None, **LORA)
    right = ask(alone, first)[0]
    assert ask(alone, None)[0] != right != ask(alone, other)[0]
    alone.close()

    engine = driver.open(store, **LORA)
    assert ask(engine, first) == (right, [0, 0])
    engine.forget()
    assert ask(engine, first) == (right, [384, 384]), "an adapter's KV is found"
    assert engine.llm.llm_engine.add_lora(early), "read before any request asks for it"
    make_adapter(driver.model, folders[2], 9)
    kept = {path.name: path.read_bytes() for path in folders[0].iterdir()}
    make_adapter(driver.model, folders[0], 8)
    engine.forget()
    stored = engine.counters()["store_blocks"]
    ask(engine, early)
    assert engine.flush()
    new = [text(seed, 400) for seed in range(5, 7)]
    spoiled = ask(engine, first, new)
    counts = engine.counters()
    assert spoiled[1] == [0, 0]
    assert (counts["adapters_unknown"], counts["store_blocks"]) == (4, stored), "neither is stored"
    engine.close()

    for name, content in kept.items():  # as another host still has it at the same place
        (folders[0] / name).write_bytes(content)
    alone = driver.open(None, **LORA)
    right = ask(alone, first, new)[0]
    alone.close()
    assert spoiled[0] != right
    engine = driver.open(store, **LORA)
    answers = ask(engine, first, new), ask(engine, first)[1]
    engine.close()
    assert answers == ((right, [0, 0]), [384, 384])


def test_an_adapter_that_changes_between_a_plan_and_its_step_is_not_stored(
    driver: VllmDriver, store: StoreAddress, tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    make_adapter(driver.model, tmp_path / "a", 1)
    engine = driver.open(store, **LORA)
    begin = engine.worker_side.begin_loads

    def begin_loads(plan: Any) -> None:
        if plan.saves:
            make_adapter(driver.model, tmp_path / "a", 2)
        begin(plan)

    engine.worker_side.begin_loads = begin_loads  # type: ignore[method-assign]
    ask(engine, LoRARequest("a", 1, str(tmp_path / "a")))
    assert engine.flush()
    counts = engine.counters()
    engine.close()
    assert counts["stores_unsure"] >= 1
    assert counts.get("stores", 0) == 0


OLD, NEW = "1" * 40, "2" * 40


def test_a_model_of_a_hub_is_its_commit(tmp_path: Path) -> None:
    """Also where it was fetched by this very engine: transformers does not say which commit it read."""
    hub = tmp_path / "models--somebody--model"
    drawn = iter(range(9))

    def text(asked: str = "") -> str:
        source = WeightsSource("somebody/model", asked=asked, cache=str(tmp_path))
        return source.digest(lambda: f"own {next(drawn)}")

    def fetch(commit: str) -> None:
        (hub / "snapshots" / commit).mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (hub / "snapshots" / commit / name).write_text(commit)
        (hub / "refs").mkdir(exist_ok=True)
        (hub / "refs" / "main").write_text(commit)

    assert text() == "own 0:", "nothing is there"
    engine_starts()
    fetch(OLD)
    assert text() == f"{OLD}:", "what was fetched by this engine, or beside it, is all there is"
    fetch(NEW)
    assert text() == "own 1:", "it may have read the one before"
    assert text(OLD) == f"{OLD}:"
    engine_starts()
    assert text() == f"{NEW}:"
