"""Measure time to first token in transformers: 95 % of a prompt loaded from the store, against computing all of it.

Requires the environment of the engines (``make install-engines``). The model is a random Llama in float32 on one thread; the
record contains its sizes. Each round answers a prompt whose last 5 % are new in three ways, in rotating order: with the store
(lookup, load from the node's DRAM, import, computation of the rest), with the model alone, and, as the limit, with the KV of the
first 95 % already in the model's own cache. A second part measures the cost of the hook for new prompts: first token and further
tokens. All answers are compared with each other.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import Figure, Options, Reference, Target, interleave, options
from kvstore.embedded.cluster import LocalCluster, NodeSpec

BLOCK = 64
HIT_SHARE = 0.95
PRICED = 2048
"""Longest prompt for measuring the cost of the hook without hits."""
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 6, 384, 6, 3, 64
DECODED = 128
"""Tokens per answer when further tokens are timed. Storing the prompt slows down the first few."""


@dataclass
class Answers:
    """Times and answers of one contestant, one entry per round."""

    seconds: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)


class Bench:
    """A model, a store, and the contestants."""

    def __init__(self, tokens: int, cluster: LocalCluster) -> None:
        import torch
        from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

        from kvclient.engines.transformers import PrefixStore

        torch.set_num_threads(1)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            initializer_range=0.1,
            max_position_embeddings=4 * tokens,
        )
        self._torch = torch
        self._draw = torch.Generator().manual_seed(1)
        self.model: Any = LlamaForCausalLM(config).eval()
        node = cluster.node("n").local_socket
        self.store = PrefixStore.connect(self.model, block_tokens=BLOCK, metadata=cluster.metadata_address, node=node)
        self.tokens, self.hit = tokens, int(tokens * HIT_SHARE) // BLOCK * BLOCK
        self.prefix = self.ids(self.hit)
        with self.store.cache(self.prefix) as cache:
            self._generate(self.prefix, 1, cache)
        self.store.flush()
        local = DynamicCache(config=config)
        with torch.no_grad():
            self.model(self.prefix, past_key_values=local, use_cache=True)
        self._local = [(layer.keys, layer.values) for layer in local.layers]
        self._new_cache: Callable[[], Any] = lambda: DynamicCache(self._local)
        self.loaded = 0

    def ids(self, tokens: int) -> Any:  # noqa: ANN401  # torch is loaded late
        """Draw new random tokens, ``[1, tokens]``."""
        return self._torch.randint(0, 512, (1, tokens), generator=self._draw)

    def prompt(self) -> Any:  # noqa: ANN401
        """Make a prompt of the known prefix and a new tail."""
        return self._torch.cat([self.prefix, self.ids(self.tokens - self.hit)], 1)

    def _generate(self, ids: Any, tokens: int, cache: Any = None) -> tuple[list[float], list[int]]:  # noqa: ANN401
        """Generate an answer. Returns the time of each token, and the tokens."""
        known: list[float] = []

        def clock(_ids: object, scores: Any) -> Any:  # noqa: ANN401
            known.append(time.perf_counter())
            return scores

        said = self.model.generate(
            input_ids=ids,
            attention_mask=self._torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=[clock],
        )
        return known, said[0, ids.shape[1] :].tolist()

    def timed(self, ids: Any, tokens: int, into: Answers, cache: Callable[[], Any]) -> float:  # noqa: ANN401
        """Measure the seconds to the first token, and append all results to ``into``."""
        begin_s = time.perf_counter()
        known, said = self._generate(ids, tokens, cache())
        into.tokens.append(said)
        into.steps.append(
            statistics.fmean(later - earlier for earlier, later in itertools.pairwise(known)) if tokens > 1 else 0.0
        )
        into.seconds.append(known[0] - begin_s)
        return known[0] - begin_s

    def with_store(self, ids: Any, tokens: int, into: Answers) -> float:  # noqa: ANN401
        """Answer with the store, and wait until the prompt is stored so that this does not disturb the next contestant."""
        held: list[Any] = []

        def cache() -> Any:  # noqa: ANN401
            held.append(self.store.cache(ids))
            return held[0]

        seconds = self.timed(ids, tokens, into, cache)
        self.loaded = held[0].loaded_tokens
        held[0].commit()
        return seconds

    def alone(self, ids: Any, tokens: int, into: Answers) -> float:  # noqa: ANN401
        """Answer with the model alone."""
        return self.timed(ids, tokens, into, lambda: None)

    def at_hand(self, ids: Any, tokens: int, into: Answers) -> float:  # noqa: ANN401
        """Answer with the prefix in the model's own cache."""
        return self.timed(ids, tokens, into, self._new_cache)


class Round:
    """Prompts that are the same for all contestants of a round."""

    def __init__(self, make: Callable[[], Any], contestants: int) -> None:
        self._make, self._contestants, self._asked, self._ids = make, contestants, 0, None

    def ids(self) -> Any:  # noqa: ANN401
        """Prompt of the current round."""
        if self._asked % self._contestants == 0:
            self._ids = self._make()
        self._asked += 1
        return self._ids


def run(given: Options, tokens: int, cluster: LocalCluster) -> None:
    """Measure all figures of one prompt length."""
    bench = Bench(tokens, cluster)
    size = f"Llama {LAYERS} layers, hidden {HIDDEN}, {KV_HEADS} KV heads x {HEAD_DIM}, float32, 1 thread"
    kv_bytes = bench.hit * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
    notes = (
        f"{size}; {bench.hit} of {tokens} tokens, {kv_bytes / 1e6:.0f} MB of KV from this host's DRAM, blocks of {BLOCK} tokens"
    )
    answers = {name: Answers() for name in ("store", "alone", "at hand")}
    prompts = Round(bench.prompt, 3)
    samples = interleave(
        {
            "store": lambda: bench.with_store(prompts.ids(), 1, answers["store"]) * 1e3,
            "alone": lambda: bench.alone(prompts.ids(), 1, answers["alone"]) * 1e3,
            "at hand": lambda: bench.at_hand(prompts.ids(), 1, answers["at hand"]) * 1e3,
        },
        given.repetitions,
    )
    assert bench.loaded == bench.hit, "the store did not return the stored prefix"
    assert answers["store"].tokens == answers["alone"].tokens == answers["at hand"].tokens
    given.keep(
        Figure(
            "transformers_ttft_hit", "transformers: first token on a 95 % hit", {"tokens": tokens}, "ms", lower_is_better=True
        ),
        samples["store"],
        peer=Reference("recompute", samples["alone"]),
        limit=Reference("prefix in the model's own cache", samples["at hand"]),
        target=Target("peer", 1.0),
        verified=False,
        notes=notes,
    )
    if tokens <= PRICED:
        price(given, bench, tokens, size)
    bench.store.close()


def price(given: Options, bench: Bench, tokens: int, size: str) -> None:
    """Measure the cost of the hook without hits."""
    answers = {name: Answers() for name in ("store", "alone")}
    prompts = Round(lambda: bench.ids(tokens), 2)
    first = interleave(
        {
            "store": lambda: bench.with_store(prompts.ids(), DECODED, answers["store"]) * 1e3,
            "alone": lambda: bench.alone(prompts.ids(), DECODED, answers["alone"]) * 1e3,
        },
        given.repetitions,
    )
    assert bench.loaded == 0
    assert answers["store"].tokens == answers["alone"].tokens
    steps = {name: [second * 1e3 for second in answer.steps[-given.repetitions :]] for name, answer in answers.items()}
    for name, title, samples, bound in (
        ("transformers_ttft_miss", "transformers: first token without a hit", first, 1.03),
        ("transformers_tpot", "transformers: each further token, while the prompt is stored", steps, 1.02),
    ):
        given.keep(
            Figure(name, title, {"tokens": tokens}, "ms", lower_is_better=True),
            samples["store"],
            peer=Reference("without the hook", samples["alone"]),
            target=Target("peer", bound),
            notes=f"{size}; the hook stores in the background",
        )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this script."""
    parser.add_argument("--tokens", type=int, nargs="+", help="prompt lengths in tokens (default 2048 8192)")


def main() -> None:
    """Measure all prompt lengths."""
    given = options("engine_transformers", __doc__, arguments=arguments)
    if find_spec("transformers") is None:
        sys.exit("transformers is not installed: this benchmark runs in the environment of the engines (make install-engines)")
    dram_bytes = given.pick(full=1 << 30, quick=512 << 20, smoke=64 << 20)
    with tempfile.TemporaryDirectory(dir=given.scratch) as folder:
        for tokens in given.extra.tokens or given.pick(full=[2048, 8192], quick=[2048], smoke=[256]):
            with LocalCluster([NodeSpec("n", dram_bytes=dram_bytes)], Path(folder) / str(tokens)) as cluster:
                run(given, tokens, cluster)


if __name__ == "__main__":
    main()
