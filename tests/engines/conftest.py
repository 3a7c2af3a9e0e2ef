"""Fixtures of tests with real engines. They run in their own environment (``make test-engines``) and are skipped elsewhere."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.testing.conformance.engine import hide_dict_of_llvmlite

if TYPE_CHECKING:
    from generate_bed import Connect

    from kvclient.engines.transformers import PrefixStore
    from kvstore.embedded.cluster import LocalCluster
    from kvstore.testing.connector.driver import StoreAddress

_MIB = 1 << 20
START_S = 300
"""Timeout per test in seconds. Engine start takes half a minute, and several times that on a busy machine."""

# Set before any engine is imported: no hub, no telemetry, one thread per engine, and engines in this process by default.
os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", LMCACHE_TRACK_USAGE="false"
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
hide_dict_of_llvmlite()  # test modules import LMCache, and other tests of the same process start vLLM


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))  # engines emit many warnings that do not concern the store
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(START_S))


@pytest.fixture(scope="module")
def model_folder() -> Iterator[Path]:
    """Folder for the model of an engine in another process, outside pytest's folders.

    A pytest run that starts at the same time writes into pytest's folders at two levels, which looks as if one had been moved.
    """
    with tempfile.TemporaryDirectory(prefix="kvstore-model-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for the models of engines in this process."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreAddress]:
    """Addresses of a store with one node, shared by the tests of a module."""
    from kvstore.embedded.cluster import LocalCluster, NodeSpec
    from kvstore.testing.connector.driver import StoreAddress

    with LocalCluster([NodeSpec("n", dram_bytes=256 * _MIB)], tmp_path_factory.mktemp("store")) as cluster:
        yield StoreAddress(cluster.metadata_address, cluster.node("n").local_socket)


# ---- of the transformers hook; imported where used, for the environment above must be set first, and be enough for others ----
@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    from generate_bed import tiny

    folder, made = tmp_path_factory.mktemp("models"), {}

    def model(family: str) -> Any:
        if family not in made:
            made[family] = tiny(family, folder)
        return made[family]

    model.folder = folder  # type: ignore[attr-defined]
    return model


@pytest.fixture
def llama(models: Callable[[str], Any]) -> Any:
    return models("llama")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A healthy store, shared by the tests of a module."""
    from kvstore.embedded.cluster import LocalCluster, NodeSpec

    with LocalCluster([NodeSpec("n", dram_bytes=128 * _MIB)], tmp_path_factory.mktemp("store")) as cluster:
        yield cluster


@pytest.fixture
def fragile(tmp_path: Path) -> Iterator[LocalCluster]:
    """A store that the test may break."""
    from kvstore.embedded.cluster import LocalCluster, NodeSpec

    with LocalCluster([NodeSpec("n", dram_bytes=32 * _MIB, nvme_bytes=64 * _MIB)], tmp_path / "store") as cluster:
        yield cluster


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connect models to the store, by default with one salt per test, so that namespaces differ."""
    from generate_bed import BLOCK

    from kvclient.engines.transformers import PrefixStore

    made: list[PrefixStore] = []

    def connect_(cluster: LocalCluster, model: Any, salt: str | None = None, **how: Any) -> PrefixStore:
        salt = f"{os.environ['PYTEST_CURRENT_TEST']}" if salt is None else salt
        how = {"block_tokens": BLOCK, "salt": salt, **how}
        node = cluster.node("n").local_socket
        made.append(PrefixStore.connect(model, metadata=cluster.metadata_address, node=node, **how))
        return made[-1]

    yield connect_
    for store in made:
        store.close()
