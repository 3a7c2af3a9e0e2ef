"""Every architecture of the documentation's table of models: the tokens of vLLM alone, from KV that another process stored.

Few run by default, all with ``--thorough``. With ``--thorough --record-models`` the record of the table is written again
(``docs/reference/models.json``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from models_bed import ConnectorModel, served

from kvstore.lab.model_recipes import RECIPES, Recipe
from kvstore.testing.connector.driver import StoreAddress
from nursery import run_engine

SAMPLE = ("gptoss", "mistral", "qwen3next", "deepseek3")
"""Sinks and experts, windows in all layers, linear attention, latents. Other tests run Llama, Qwen 3, Gemma and LFM 2."""
RECORD = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.json"
START_S, MODEL_S = 160.0, 30.0
"""Limit of the other process: for its start, and per model."""
pytestmark = pytest.mark.timeout(600, func_only=True)
HAS_TORCHVISION = find_spec("torchvision") is not None


def stored_elsewhere(names: Sequence[str], folder: Path, store: StoreAddress, *options: str) -> dict[str, Any]:
    """Have another process answer without the store, then with it, and store."""
    script = Path(__file__).with_name("models_bed.py")
    argv = [sys.executable, str(script), store.metadata, store.node, str(folder), *names, *options]
    limit_s = START_S + MODEL_S * len(names)
    done = run_engine(argv, limit_s)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def elsewhere(request: pytest.FixtureRequest, folder: Path, store: StoreAddress) -> dict[str, Any]:
    """Answers of the other process, for the models of this run that a CPU can run."""
    every = request.config.getoption("--thorough")
    names = [name for name in RECIPES if (every and runs(name)) or name in SAMPLE]
    return stored_elsewhere(names, folder, store)


def runs(name: str) -> bool:
    """Whether this machine can run a model."""
    return not RECIPES[name].cannot and (HAS_TORCHVISION or not RECIPES[name].torchvision)


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The record; it is written again with ``--record-models``."""
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    yield record
    if request.config.getoption("--record-models"):
        kept = {name: record[name] for name in RECIPES if name in record}
        RECORD.write_text(json.dumps(kept, indent=1) + "\n")


def param(name: str) -> Any:
    marks = [] if name in SAMPLE else [pytest.mark.thorough]
    if not runs(name):
        marks.append(pytest.mark.skip(reason="needs torchvision, which make install-engines could not install"))
    return pytest.param(name, marks=marks)


def check_row(request: pytest.FixtureRequest, rows: dict[str, Any], name: str, **shown: Any) -> None:
    """Compare the record with the results of this run, or update it."""
    row = {"recipe": RECIPES[name].digest, **shown}
    if request.config.getoption("--record-models"):
        rows[name] = row
    assert rows[name] == row, "run with --thorough --record-models"


@pytest.mark.parametrize("name", [param(name) for name, recipe in RECIPES.items() if not recipe.cannot])
def test_model_answers_the_same_from_the_store(
    name: str, elsewhere: dict[str, Any], folder: Path, store: StoreAddress, rows: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Changed bytes change tokens."""
    recipe, other = RECIPES[name], elsewhere.get(name, {"error": "not run: an earlier model failed in the other process"})
    assert "error" not in other, other["error"]
    assert other["storing"] == other["fresh"]
    with served(name, folder, store) as engine:
        answers = engine.answers()
        assert [tokens for tokens, _ in answers] == other["cached"]
        hits = [hit for _, hit in answers]
        if _computes_whole_prompts(recipe, engine):
            assert hits == [0] * len(hits)
            return  # the record is of a CPU with AMX
        assert all(hits[:3])
        engine.settle()
        engine.forget()
        engine.spoil()
        spoiled = engine.answers()
        assert [hit for _, hit in spoiled] == hits
        assert spoiled[0][0] != other["cached"][0]
        assert spoiled[1][0] != other["cached"][1]
    check_row(request, rows, name, result="same tokens", hit_tokens=hits[0], groups=other["groups"])


def _computes_whole_prompts(recipe: Recipe, engine: Any) -> bool:
    """Whether the model has latents, and this CPU lacks AMX."""
    return recipe.whole_prompts and isinstance(engine, ConnectorModel) and engine.engine.whole_prompts_only


@pytest.mark.thorough
def test_model_with_patch_cannot_run_without(folder: Path, store: StoreAddress) -> None:
    """If it runs one day, the table must say so."""
    error = stored_elsewhere(["mamba2"], folder, store, "--no-patch")["mamba2"].get("error", "")
    assert RECIPES["mamba2"].fails_with in error


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.cannot])
def test_model_cannot_run_on_a_cpu(
    name: str, folder: Path, store: StoreAddress, rows: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """In vLLM itself, without the store. If it runs one day, the table must say so."""
    error = stored_elsewhere([name], folder, store)[name].get("error", "")
    assert RECIPES[name].fails_with in error
    assert error
    check_row(request, rows, name, result="not run")
