"""Runs of tiny models of all architectures (``kvstore.lab.model_recipes``) through the connector that serves them.

As a script: the process that answers without the store, then with it, and stores. It prints its results as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from tier_bed import TierEngine
from vllm_bed import VllmDriver, VllmEngine, text

from kvclient.engines.file_stamps import mark_engine_start
from kvstore.lab.model_recipes import CONNECTOR, IMAGE_TOKENS, RECIPES, Recipe, make_recipe
from kvstore.testing.connector.driver import StoreAddress

PROMPTS = [text(1, 700), text(2, 620), text(3, 128), text(4, 31)]
ANSWER_TOKENS = 12
_SETTLED_S = 30.0


def image_prompts() -> list[Any]:
    """Prompts that differ only in the color of their image, with text before and after it."""
    from PIL import Image

    place = [IMAGE_TOKENS[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end")]
    tokens = [*text(5, 200), *place, *text(6, 300)]
    images = [Image.new("RGB", (112, 112), color) for color in ("red", "blue")]
    return [{"prompt_token_ids": tokens, "multi_modal_data": {"image": image}} for image in images]


def export_no_states() -> None:
    """The one-line patch of vLLM: states of Mamba 2 are not exported from within a step, so prompts are computed in pieces."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    if "get_kv_cache_spec" in vars(MambaMixer2):
        del MambaMixer2.get_kv_cache_spec


Answers = list[tuple[list[int], int]]
"""Tokens of each answer, and how many tokens of its prompt were not computed."""


class ServedModel(Protocol):
    """An engine with one of the connectors."""

    def answers(self) -> Answers:
        """Answer the prompts, one at a time."""

    def settle(self) -> None:
        """Wait until the store has all blocks."""

    def spoil(self) -> None:
        """Change the bytes of all later loads."""

    def forget(self) -> None:
        """Empty the cache of the engine."""


class ConnectorModel:
    """An engine with ``KVStoreConnector``, or without a store."""

    def __init__(self, engine: VllmEngine, prompts: Sequence[Any]) -> None:
        self.engine = engine
        self._prompts = prompts

    def answers(self) -> Answers:
        found = [self.engine.generate([prompt], ANSWER_TOKENS)[0] for prompt in self._prompts]
        return [(list(one.tokens), one.loaded_tokens) for one in found]

    def settle(self) -> None:
        assert self.engine.flush(_SETTLED_S)

    def spoil(self) -> None:
        for client in self.engine.worker_side.clients:
            start_load = client.start_load

            def start_spoiled(lookup: Any, pages: Any, start_load: Any = start_load, **how: Any) -> Any:
                handle = start_load(lookup, pages, **how)
                handle.result()
                for page in range(pages.count):
                    for piece in pages.segments(page, 0, pages.shape.layers):
                        piece[:] = bytes(piece)[::-1]
                return handle

            client.start_load = start_spoiled  # type: ignore[method-assign]

    def forget(self) -> None:
        self.engine.forget()


class TierModel:
    """An engine with ``KVStoreOffloadingConnector``."""

    def __init__(self, engine: TierEngine) -> None:
        self.engine = engine

    def answers(self) -> Answers:
        return [(one.tokens, one.cached_tokens) for one in self.engine.answers(PROMPTS, ANSWER_TOKENS)]

    def settle(self) -> None:
        self.engine.settle()

    def spoil(self) -> None:
        for store in self.engine.tier.stores.values():
            load = store.load

            def spoiled(chunks: Any, *how: Any, load: Any = load) -> Any:
                result = load(chunks, *how)
                for chunk in chunks:
                    chunk.row[:] = chunk.row[::-1].copy()
                return result

            store.load = spoiled  # type: ignore[method-assign]

    def forget(self) -> None:
        self.engine.forget_memory()


@contextmanager
def served(name: str, folder: Path, store: StoreAddress | None, *, patch: bool = True) -> Iterator[ServedModel]:
    """An engine with the model of a recipe; ``store`` None: vLLM alone."""
    recipe, model = RECIPES[name], make_recipe(folder, name)
    if recipe.patch and patch:
        export_no_states()
    if recipe.images:
        mark_engine_start()  # lists of the model identify how images are prepared, and perhaps this process has just written them
    made: Any
    if store is None or recipe.served_by == CONNECTOR:
        made = VllmDriver(model).open(store, dtype=recipe.dtype)
        wrapped: ServedModel = ConnectorModel(made, [*PROMPTS, *image_prompts()] if recipe.images else PROMPTS)
    else:
        made = TierEngine(model, store, {}, dtype=recipe.dtype)
        wrapped = TierModel(made)
    try:
        yield wrapped
    finally:
        made.close()


def groups_of(engine: VllmEngine) -> list[str]:
    """vLLM's KV cache groups in words, e.g. ``sliding window, 32 tokens``."""
    groups = engine.core.scheduler.kv_cache_config.kv_cache_groups
    kinds = [_kind(group.kv_cache_spec) for group in groups]
    return [f"{kinds.count(kind)} x {kind}" if kinds.count(kind) > 1 else kind for kind in dict.fromkeys(kinds)]


def _kind(spec: Any) -> str:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    return f"{get_kv_cache_spec_kind(spec).value.replace('_', ' ')} ({spec.block_size} tokens)"


def stored(recipe: Recipe, name: str, folder: Path, store: StoreAddress, *, patch: bool = True) -> dict[str, Any]:
    """Answer without the store, then with it, and store."""
    with served(name, folder, None, patch=patch) as alone:
        assert isinstance(alone, ConnectorModel)
        fresh, cached = ([tokens for tokens, _ in alone.answers()] for _ in range(2))
        found: dict[str, Any] = {"fresh": fresh, "cached": cached, "groups": groups_of(alone.engine)}
    if not recipe.cannot:
        with served(name, folder, store) as storing:
            found["storing"] = [tokens for tokens, _ in storing.answers()]
            storing.settle()
    return found


def main() -> None:
    """Store some models, one after the other."""
    parser = argparse.ArgumentParser()
    for name in ("metadata", "node", "folder"):
        parser.add_argument(name)
    parser.add_argument("names", nargs="+", choices=RECIPES)
    parser.add_argument("--no-patch", action="store_true", help="without the patch of a recipe")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for name in given.names:
        try:
            store = StoreAddress(given.metadata, given.node)
            found[name] = stored(RECIPES[name], name, Path(given.folder), store, patch=not given.no_patch)
        except Exception as error:  # noqa: BLE001  # reported to the test
            found[name] = {"error": f"{type(error).__name__}: {error}"}
            break  # vLLM does not start again in this process
    print(json.dumps(found))


if __name__ == "__main__":
    import os

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main()
