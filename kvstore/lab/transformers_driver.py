"""The transformers hook as the connector conformance kit drives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.testing.connector.driver import EngineAnswer, StoreAddress


@dataclass(frozen=True, slots=True)
class TransformersDriver:
    """Opens models of transformers with the hook in them.

    Attributes:
        model: folder of a decoder-only model.
        block_tokens: tokens of a block.
    """

    model: Path
    block_tokens: int = 16

    def open(self, store: StoreAddress | None, options: Mapping[str, object]) -> TransformersEngine:
        """Load the model and connect it with the store, if there is one."""
        return TransformersEngine(self, store, options)


class TransformersEngine:
    """A model, with or without a store. Whatever ``generate`` keeps ends with the call, so there is nothing to forget."""

    def __init__(self, driver: TransformersDriver, store: StoreAddress | None, options: Mapping[str, object]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from kvclient.engines.transformers import PrefixStore

        torch.set_num_threads(1)
        self._model: Any = AutoModelForCausalLM.from_pretrained(driver.model).eval()
        self._store: PrefixStore | None = None
        if store is not None:
            given: dict[str, Any] = {"metadata": store.metadata, "node": store.node, **options}
            self._store = PrefixStore.connect(self._model, block_tokens=driver.block_tokens, **given)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[EngineAnswer]:
        """One after the other: a batch takes as many columns from the store as its worst row allows."""
        return [self._answer(prompt, max_tokens) for prompt in prompts]

    def _answer(self, prompt: Sequence[int], max_tokens: int) -> EngineAnswer:
        import torch

        ids = torch.tensor([list(prompt)])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
        given |= {"min_new_tokens": max_tokens, "max_new_tokens": max_tokens}
        if self._store is None:
            return EngineAnswer(tuple(self._model.generate(**given)[0, len(prompt) :].tolist()))
        with self._store.cache(ids) as cache:
            tokens = self._model.generate(**given, past_key_values=cache)[0, len(prompt) :].tolist()
        return EngineAnswer(tuple(tokens), cache.loaded_tokens)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all offered blocks are stored or given up."""
        return self._store is None or self._store.flush(timeout_s)

    def forget(self) -> None:
        """Nothing is kept between calls."""

    def counters(self) -> Mapping[str, int]:
        """The hook's and its client's."""
        return {} if self._store is None else self._store.stats()

    def close(self) -> None:
        """Close the connection to the store."""
        if self._store is not None:
            self._store.close()
