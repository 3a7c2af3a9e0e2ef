"""The router in front of two served vLLM engines, with real clients: whole requests on either engine, and pairs over both."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.wait import wait_until

pytest.importorskip("vllm")

import openai
from adapters_bed import RANK, make_adapter
from pd_bed import BLOCK, DECODE, PREFILL, Oracle, PdBed, pd_bed, text

from kvstore.lab.engine_bed import token_ids_of
from kvstore.lab.router_process import RouterProcess
from kvstore.testing.tiny_models import make_model

WAIT_S = 30.0
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[PdBed]:
    """Engines that load adapters at run time."""
    serve = {
        "arguments": ("--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK)),
        "environment": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
    }
    with pd_bed(tmp_path_factory.mktemp("router"), make_model(model_folder / "tiny"), serve=serve) as made:
        yield made


@pytest.fixture(scope="module")
def oracle(bed: PdBed) -> Oracle:
    return Oracle(bed.model)


@pytest.fixture(scope="module")
def plain(bed: PdBed) -> Iterator[RouterProcess]:
    """Both engines serve whole requests."""
    engines = ",".join(f"{name}=http://{bed.engines.engine(name).address}@{name}" for name in (PREFILL, DECODE))
    with RouterProcess(["--engine", engines, *common(bed, "plain")], bed.engines.folder, "plain") as router:
        yield router


@pytest.fixture(scope="module")
def pairs(bed: PdBed) -> Iterator[RouterProcess]:
    """One engine prefills, one decodes. The scheduler manages only one pool of engines, so this router places requests alone."""
    prefill, decode = (f"{name}=http://{bed.engines.engine(name).address}@{name}" for name in (PREFILL, DECODE))
    arguments = ["--prefill", prefill, "--decode", decode, *common(bed, "pairs"), "--policy", "least_loaded"]
    with RouterProcess(arguments, bed.engines.folder, "pairs") as router:
        yield router


def common(bed: PdBed, name: str) -> list[str]:
    return ["--metadata", bed.cluster.metadata_address, "--set", f"router.name={name}", "--set", "router.check_interval=200ms"]


_clients: list[openai.OpenAI] = []


@pytest.fixture(scope="module", autouse=True)
def closed_clients() -> Iterator[None]:
    """Close all clients; open sockets would cause warnings at the end of the run."""
    yield
    while _clients:
        _clients.pop().close()


def client(router: RouterProcess) -> openai.OpenAI:
    _clients.append(openai.OpenAI(base_url=router.url, api_key="none", max_retries=0, timeout=60))
    return _clients[-1]


def counter(router: RouterProcess, name: str) -> int:
    with urllib.request.urlopen(f"http://{router.address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return next((int(float(line.split()[1])) for line in lines if line.startswith(f"kvstore_{name} ")), 0)


@pytest.fixture(params=[pytest.param("plain", marks=pytest.mark.thorough), "pairs"])
def router(request: pytest.FixtureRequest) -> RouterProcess:
    found: RouterProcess = request.getfixturevalue(request.param)
    return found


def test_router_completions_match_the_model(router: RouterProcess, oracle: Oracle) -> None:
    for number, length in enumerate((5, 32, 333)):
        prompt = text(("router", router.address, number), length)
        answer = client(router).completions.create(model="tiny", prompt=prompt, max_tokens=12, **GREEDY)
        assert token_ids_of(answer.model_dump()) == oracle.says(prompt, 12)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == length


def test_router_stream_equals_whole_response(router: RouterProcess) -> None:
    with client(router) as chat_client:
        messages: Any = [{"role": "user", "content": "Once upon a time " * 20}]
        whole = chat_client.chat.completions.create(model="tiny", messages=messages, max_tokens=24, **GREEDY)
        stream = chat_client.chat.completions.create(model="tiny", messages=messages, max_tokens=24, stream=True, **GREEDY)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len([piece for piece in pieces if piece]) > 5
    assert "".join(pieces) == whole.choices[0].message.content


def test_router_engine_rejections_reach_client(router: RouterProcess) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client(router).completions.create(model="tiny", prompt=text("long", 5_000), max_tokens=8)
    assert "maximum" in str(refused.value)
    with pytest.raises(openai.NotFoundError):
        client(router).completions.create(model="other", prompt="a", max_tokens=8)
    assert [model.id for model in client(router).models.list()] == ["tiny"]


def test_router_client_leaving_stream_frees_engine(bed: PdBed, router: RouterProcess) -> None:
    stream = client(router).completions.create(model="tiny", prompt="a b c", max_tokens=3_000, stream=True, **GREEDY)
    next(iter(stream))
    stream.close()
    engines = [bed.engines.engine(name) for name in (PREFILL, DECODE)]
    wait_until(lambda: all(engine.metrics()["vllm:num_requests_running"] == 0 for engine in engines), "nothing runs")
    assert sum(engine.metrics()["vllm:generation_tokens_total"] for engine in engines) < 100_000


def test_router_pairs_hand_prompts_over(bed: PdBed, pairs: RouterProcess, oracle: Oracle) -> None:
    before = bed.counts(bed.decode).get("prompts", 0)
    prompts = [text(("hand", number), 100 + 40 * number) for number in range(8)]

    def ask(prompt: list[int]) -> list[int]:
        return token_ids_of(client(pairs).completions.create(model="tiny", prompt=prompt, max_tokens=8, **GREEDY).model_dump())

    with ThreadPoolExecutor(2) as pool:  # with more, the decode engine would time out before the prefill engine starts
        for prompt, answer in zip(prompts, pool.map(ask, prompts), strict=True):
            assert answer == oracle.says(prompt, 8)
    assert bed.counts(bed.decode)["prompts"] == before + 8


def complete(router: RouterProcess, model: str, prompt: list[int], **extra: Any) -> list[int]:
    """Return the tokens of a greedy completion; ``extra`` are further fields of the request."""
    how = {"temperature": 0, "extra_body": {**GREEDY["extra_body"], **extra}}
    return token_ids_of(client(router).completions.create(model=model, prompt=prompt, max_tokens=8, **how).model_dump())


def hit_blocks(bed: PdBed) -> int:
    """Hit blocks of all lookups of both engines."""
    return sum(bed.counts(bed.engines.engine(name)).get("hit_blocks", 0) for name in (PREFILL, DECODE))


def late_prompts(bed: PdBed) -> int:
    """Prompts that were not handed over in time. The decode engine looks each of them up, too."""
    return bed.counts(bed.decode).get("prompts_incomplete", 0)


def served(router: RouterProcess) -> list[list[str]]:
    """Models of each engine, as the router knows them."""
    with urllib.request.urlopen(f"http://{router.address}/router/engines", timeout=10) as answer:
        return [engine["models"] for engine in json.load(answer).values()]


def serve_adapter(bed: PdBed, router: RouterProcess, name: str, folder: Path) -> None:
    """Load an adapter into both engines, and wait until the router lists it."""
    for engine in (bed.prefill, bed.decode):
        status, why = engine.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        assert status == 200, why

    wait_until(lambda: all(name in models for models in served(router)), "the router knows the adapter")


def test_router_adapters_loaded_at_run_time(bed: PdBed, router: RouterProcess, oracle: Oracle, tmp_path: Path) -> None:
    """Each adapter gives its own output, and finds its own KV in the store but no other adapter's."""
    name = router.address.rpartition(":")[2]
    prompt = text(("adapted", name), 200)
    whole = (len(prompt) - 1) // BLOCK
    right = {"tiny": oracle.says(prompt, 8)}
    for number, adapter in enumerate((f"a{name}", f"b{name}")):
        make_adapter(bed.model, tmp_path / adapter, number)
        serve_adapter(bed, router, adapter, tmp_path / adapter)
        right[adapter] = Oracle(bed.model, tmp_path / adapter).says(prompt, 8)
    assert len({tuple(tokens) for tokens in right.values()}) == 3
    for model, tokens in right.items():
        bed.only_in_storage()
        before = hit_blocks(bed)
        assert complete(router, model, prompt) == tokens
        assert hit_blocks(bed) == before, "adapters do not share KV"
    for model, tokens in right.items():
        bed.only_in_storage()
        before, late = hit_blocks(bed), late_prompts(bed)
        assert complete(router, model, prompt) == tokens
        assert hit_blocks(bed) == before + whole * (1 + late_prompts(bed) - late)

    make_adapter(bed.model, tmp_path / adapter, 7)  # new weights in the same folder
    for engine in (bed.prefill, bed.decode):
        assert engine.call("POST", "/v1/unload_lora_adapter", {"lora_name": adapter})[0] == 200
    wait_until(lambda: not any(adapter in models for models in served(router)), "the router knows that the adapter is gone")
    serve_adapter(bed, router, adapter, tmp_path / adapter)
    bed.only_in_storage()  # vLLM's own prefix cache identifies an adapter by its name alone
    before = hit_blocks(bed)
    assert complete(router, adapter, prompt) == Oracle(bed.model, tmp_path / adapter).says(prompt, 8) != right[adapter]
    assert hit_blocks(bed) == before
    assert sum(bed.counts(bed.engines.engine(one)).get("adapters_unknown", 0) for one in (PREFILL, DECODE)) > 0


def test_router_equal_cache_salt_shares_blocks(bed: PdBed, router: RouterProcess, oracle: Oracle) -> None:
    prompt = text(("salted", router.address), 200)
    whole = (len(prompt) - 1) // BLOCK
    for salts, hit in ((["a"], 0), ([None], 0), (["b"], 0), (["a", "b"], whole)):
        for salt in salts:
            bed.only_in_storage()
            before, late = hit_blocks(bed), late_prompts(bed)
            assert complete(router, "tiny", prompt, **({"cache_salt": salt} if salt else {})) == oracle.says(prompt, 8)
            assert hit_blocks(bed) == before + hit * (1 + late_prompts(bed) - late)


def test_router_sessions_hit_and_are_scheduled(bed: PdBed, plain: RouterProcess) -> None:
    """Sessions of several turns: after the first turn, most of each prompt was seen before."""
    scheduled_before, sent = counter(plain, "router_scheduled_total"), 0
    prompt_tokens = cached = 0
    histories: list[list[dict[str, str]]] = [
        [{"role": "user", "content": f"agent {n}: " + "look at it. " * 100}] for n in range(3)
    ]
    for turn in range(4):
        for history in histories:
            answer = client(plain).chat.completions.create(model="tiny", messages=history, max_tokens=8, **GREEDY)  # type: ignore[arg-type]
            sent += 1
            assert answer.usage is not None
            if turn:
                prompt_tokens += answer.usage.prompt_tokens
            history += [
                {"role": "assistant", "content": answer.choices[0].message.content or ""},
                {"role": "user", "content": f"turn {turn}"},
            ]
    cached = sum(int(bed.engines.engine(name).metrics()["vllm:prefix_cache_hits_total"]) for name in (PREFILL, DECODE))
    assert cached > 0.9 * prompt_tokens
    assert counter(plain, "router_scheduled_total") - scheduled_before == sent
    assert counter(plain, "router_lookups_total") > 0


def test_router_new_finds_prompt_in_store(bed: PdBed) -> None:
    """A new router finds a stored prompt, and the engine that has it in its own cache, by tokens that an engine counts."""
    prompt, salted = "a prompt that is stored " * 40, {"cache_salt": "mine"}
    bed.prefill.complete(prompt, 2, **salted)
    engines = ",".join(f"{name}=http://{bed.engines.engine(name).address}@{name}" for name in (PREFILL, DECODE))
    arguments = ["--engine", engines, *common(bed, "fresh"), "--policy", "least_loaded"]

    def found() -> bool:
        with RouterProcess(arguments, bed.engines.folder, "fresh") as router:
            wait_until(lambda: looked_up(router), "namespaces are known")
            client(router).completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body=salted)
            cached = counter(router, "router_lookup_cache_tokens_total")  # the engine published its own cache and named it
            return counter(router, "router_lookup_hit_tokens_total") >= 900 and cached >= 900

    wait_until(found, "the prompt is found in the store")


def looked_up(router: RouterProcess) -> bool:
    """Send a new prompt; return whether any lookup has completed."""
    client(router).completions.create(model="tiny", prompt=f"something new {time.monotonic()} " * 20, max_tokens=1)
    return counter(router, "router_lookups_total") > 0


def test_router_vllm_benchmark_completes(bed: PdBed, pairs: RouterProcess) -> None:
    """``vllm bench serve``, run in this process: a process of its own would import vLLM again."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    arguments = ["--backend", "openai", "--base-url", f"http://{pairs.address}", "--endpoint", "/v1/completions"]
    arguments += ["--model", "tiny", "--tokenizer", str(bed.model), "--dataset-name", "random", "--random-input-len", "200"]
    arguments += ["--random-output-len", "8", "--num-prompts", "24", "--max-concurrency", "6", "--ignore-eos"]
    result = main(parser.parse_args(arguments))
    assert result["completed"] == 24
    assert result["total_output_tokens"] == 24 * 8


def test_router_engine_killed_loses_no_request(bed: PdBed, plain: RouterProcess, oracle: Oracle) -> None:
    """Must be the last test: it kills one engine under load."""
    prompts = [text(("killed", number), 600) for number in range(10)]

    def ask(prompt: list[int]) -> list[int]:
        return token_ids_of(client(plain).completions.create(model="tiny", prompt=prompt, max_tokens=16, **GREEDY).model_dump())

    with ThreadPoolExecutor(10) as pool:
        answers = [pool.submit(ask, prompt) for prompt in prompts]
        wait_until(lambda: bed.decode.metrics()["vllm:num_requests_running"] > 0, "the engine works")
        bed.decode.kill()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.result(60) == oracle.says(prompt, 16)
