"""Fixtures of tests with SGLang. They run only if this folder or a file in it is named, in separate processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_cases import MIB, backend_extra

from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.lab import sglang_kernels as sglang_kernels

HERE = Path(__file__).parent


def are_wanted(config: pytest.Config) -> bool:
    """Whether this run is for these tests. Others visit the folder too, and must not get the stubs."""
    named_paths = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    is_named = any(path == HERE or HERE in path.parents for path in named_paths)
    return is_named and importlib.util.find_spec("sglang") is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if are_wanted(config) else True


def pytest_configure(config: pytest.Config) -> None:
    if are_wanted(config):
        sglang_kernels.install()


@pytest.fixture(autouse=True)
def no_server() -> Iterator[None]:
    """Run each test without a server's arguments, which SGLang's trees set for the whole process."""
    from sglang.srt.runtime_context import RuntimeContext, get_parallel, use_context

    with use_context(RuntimeContext(parallel=get_parallel())):
        yield


@pytest.fixture(autouse=True)
def no_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test as in a process of its own in which nothing was cleared."""
    from kvclient.engines.sglang import backend
    from kvclient.engines.sglang.generations import Generations

    monkeypatch.setattr(backend, "OF_THIS_PROCESS", Generations())


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A store shared by all tests; each uses another model name."""
    with LocalCluster([NodeSpec("n", dram_bytes=256 * MIB)], tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.fixture
def extra(cluster: LocalCluster, request: pytest.FixtureRequest) -> Callable[..., dict[str, object]]:
    """The configuration of the backend, by keyword."""

    def make(**changes: object) -> dict[str, object]:
        return backend_extra(cluster, request.node.nodeid, **changes)

    return make


@pytest.fixture
def open_backend(extra: Callable[..., dict[str, object]]) -> Iterator[Callable[..., Any]]:
    """Makes backends as SGLang does, each with a host pool; closed at the end."""
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    from kvstore.lab.sglang_bed import storage_config

    made: list[Any] = []

    def make(pool: Any, config: dict[str, object] | None = None, **changes: object) -> Any:
        backend = StorageBackendFactory.create_backend("dynamic", storage_config(extra(**changes), **config or {}), pool)
        backend.register_mem_pool_host(pool)
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()
