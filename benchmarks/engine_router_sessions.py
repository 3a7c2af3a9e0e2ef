"""Measure agent sessions through the router: time to first token and hits with the scheduler's placement against round robin.

Two vLLM engines, each with one core, the connector and a store node, serve two routers that differ only in their policy. Each
prompt of an agent is its whole conversation plus a few new words, so about 97 % of it is known. Both policies use the same
engines alternately, with new agents and empty engine caches. One engine's cache holds a little more than half of all
conversations.

A hit in an engine's own cache is free, a hit in the store costs a load, and the remaining tokens are computed; vLLM counts all
three. The model is a Llama with random weights in float32: 4 layers, width 256, 4 KiB of KV per token. Requires vLLM.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import harness
from harness import Figure, Options, Reference, Target
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.lab.engine_bed import EngineBed, ServeSpec, store_transfer
from kvstore.lab.router_process import RouterProcess
from kvstore.testing.tiny_models import make_model

ENGINES = ("engine-0", "engine-1")
KV_BYTES = 4 * 2 * 2 * 64 * 4
"""Bytes per token: layers, K and V, heads, head width, float32."""
WORD = 40
ANSWER = 16
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """Workload of one round.

    Attributes:
        agents: number of agents.
        at_once: agents that run concurrently.
        begin: tokens of an agent's first prompt.
        turns: prompts per agent.
    """

    agents: int
    at_once: int
    begin: int
    turns: int

    @property
    def tokens(self) -> int:
        """Tokens of all conversations at the end of a round."""
        return self.agents * (self.begin + self.turns * (WORD + ANSWER))


@dataclass(slots=True)
class Round:
    """Results of one round of one policy.

    Attributes:
        first_ms: time to first token of each turn except the first, in milliseconds.
        prompt: prompt tokens.
        own: prompt tokens found in the engine's own cache.
        stored: prompt tokens loaded from the store.
    """

    first_ms: list[float] = field(default_factory=list)
    prompt: int = 0
    own: int = 0
    stored: int = 0


def first_token_ms(address: str, text: str) -> tuple[float, str]:
    """Request one streamed completion.

    Returns:
        Milliseconds until the first chunk, and the text of the answer.
    """
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    body = {"model": "tiny", "prompt": text, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "stream": True}
    start_s = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != http.client.OK:
        raise SystemExit(f"the router answered with HTTP status {answer.status}: {answer.read()[:300]!r}")
    first_ms, text_out = 0.0, ""
    for line in answer:
        if line.startswith(b"data: {"):
            first_ms = first_ms or (time.perf_counter() - start_s) * 1e3
            text_out += json.loads(line[6:])["choices"][0]["text"]
    connection.close()
    return first_ms, text_out


def talk(address: str, load: Load, seed: int) -> list[float]:
    """Run one agent and return the times to first token of its turns. The first turn is excluded because it has no hits."""
    draw = random.Random(seed)
    history = "".join(draw.choices("abcdefghij klmnopqrst uvwxyz", k=load.begin))
    times = []
    for _ in range(load.turns):
        first_ms, answer = first_token_ms(address, history)
        times.append(first_ms)
        history += answer + "".join(draw.choices("ABCDEFGHIJ ", k=WORD))
    return times[1:]


class Bed:
    """Test bed of engines, store and routers."""

    def __init__(self, stack: ExitStack, scratch: Path, load: Load) -> None:
        self.load = load
        nodes = [NodeSpec(f"node-{name}", dram_bytes=256 * MIB) for name in ENGINES]
        self.cluster = stack.enter_context(LocalCluster(nodes, scratch / "store"))
        self.engines = stack.enter_context(EngineBed(scratch / "engines"))
        model = make_model(scratch / "model")
        own = int(load.tokens * KV_BYTES * 0.6)  # an engine's own cache holds a little more than half of all conversations
        specs = [
            ServeSpec(
                name,
                model,
                store_transfer(self.cluster.metadata_address, self.cluster.node(f"node-{name}").local_socket),
                core=core,
                kv_cache_bytes=own,
            )
            for core, name in enumerate(ENGINES)
        ]
        self.engines.start(*specs)
        given = ",".join(f"{name}=http://{self.engines.engine(name).address}@node-{name}" for name in ENGINES)
        self.routers = {
            policy: stack.enter_context(
                RouterProcess(
                    ["--engine", given, "--policy", policy, "--metadata", self.cluster.metadata_address],
                    scratch / "routers",
                    policy,
                )
            )
            for policy in ("scheduler", "round_robin")
        }

    def totals(self) -> tuple[int, int, int]:
        """Prompt tokens, hits in the engines' own caches and hits in the store, since the engines started."""
        names = ("vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
        metrics = [engine.metrics() for engine in self.engines]
        prompt, own, stored = (int(sum(one.get(name, 0.0) for one in metrics)) for name in names)
        return prompt, own, stored

    def round(self, policy: str, seed: int) -> Round:
        """Run one round with new agents on engines with empty caches."""
        for engine in self.engines:
            engine.reset_prefix_cache()
        before = self.totals()
        address = self.routers[policy].address
        with ThreadPoolExecutor(self.load.at_once) as pool:
            talks = [pool.submit(talk, address, self.load, seed * 1_000 + agent) for agent in range(self.load.agents)]
            times = [one for done in talks for one in done.result()]
        prompt, own, stored = (after - was for after, was in zip(self.totals(), before, strict=True))
        return Round(times, prompt, own, stored)


def main(options: Options) -> None:
    """Measure both policies and record the figures."""
    load = options.pick(full=Load(6, 3, 2_200, 12), quick=Load(4, 2, 1_500, 8), smoke=Load(2, 2, 600, 3))
    rounds: dict[str, list[Round]] = {"scheduler": [], "round_robin": []}
    seeds = iter(range(options.seed, options.seed + 10_000))
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch, ExitStack() as stack:
        bed = Bed(stack, Path(scratch), load)

        def measured(policy: str) -> float:
            one = bed.round(policy, next(seeds))
            rounds[policy].append(one)
            return statistics.median(one.first_ms)

        samples = harness.interleave({policy: partial(measured, policy) for policy in rounds}, options.repetitions)
    counted = {policy: some[-options.repetitions :] for policy, some in rounds.items()}
    parameters = {
        "engines": len(ENGINES),
        "agents": load.agents,
        "at_once": load.at_once,
        "begin": load.begin,
        "turns": load.turns,
    }
    options.keep(
        Figure("router_first_token", "Router: time to first token of agents' turns", parameters, "ms", lower_is_better=True),
        samples["scheduler"],
        peer=Reference("round robin", samples["round_robin"]),
        target=Target("peer", 1.0),
        notes="; ".join(f"{policy}: {shares(some)}" for policy, some in counted.items()),
    )
    p90 = {policy: [statistics.quantiles(one.first_ms, n=10)[-1] for one in some] for policy, some in counted.items()}
    options.keep(
        Figure("router_first_token_p90", "Router: 90th percentile of the same", parameters, "ms", lower_is_better=True),
        p90["scheduler"],
        peer=Reference("round robin", p90["round_robin"]),
    )
    own = {policy: [100 * one.own / one.prompt for one in some] for policy, some in counted.items()}
    options.keep(
        Figure("router_own_hits", "Router: prompt tokens in the engine's own cache", parameters, "%"),
        own["scheduler"],
        peer=Reference("round robin", own["round_robin"]),
    )


def shares(rounds: list[Round]) -> str:
    """Format the shares of prompt tokens by source."""
    prompt = sum(one.prompt for one in rounds)
    own, stored = (100 * sum(getattr(one, name) for one in rounds) / prompt for name in ("own", "stored"))
    return f"{own:.1f} % own cache, {stored:.1f} % store, {100 - own - stored:.1f} % computed"


if __name__ == "__main__":
    main(harness.options("engine_router_sessions", __doc__))
