"""What every test shares: the traces option, hypothesis profiles, and the gate of the ``gpu`` marker."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvstore.embedded.children import Children
from kvstore.observe import counters
from nursery import Nurseries
from samples import be_thorough

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLES, ALL_EXAMPLES = 40, 100
"""Of each search that says no other number, ordinarily and with ``--thorough``."""

LONGEST = (
    "test_benchmarks_smoke",
    "test_nixl",
    "test_e2e_drain",
    "test_docs_commands",
    "test_cluster_faults",
    "test_e2e_faults",
    "test_cli_commands",
    "test_e2e_paths",
    "test_admin_page",
    "test_vllm_worker_side",
    "test_index_lmdb_model",
    "test_gds_conformance",
    "test_deploy_cluster",
    "test_hbm_model",
    "test_vllm_pd",
    "test_vllm_failures",
    "test_transformers_cache",
    "test_vllm_ranks",
    "test_sglang_alone",
    "test_vllm_router",
    "test_vllm_same_tokens",
    "test_vllm_weights",
)
"""Files that take long, the longest first: whoever has one of them last is not waited for by all others."""

# What is counted under a name that nobody declared fails the test that counts it.
counters.strict = True

# Tests start daemons while other threads of theirs are inside gRPC; its fork handlers are of no use before an exec, and a child
# was seen to abort before it had logged a word.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Machines differ in speed, so no example has a deadline of its own: pytest-timeout bounds the test.
settings.register_profile("default", deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
# The same examples each time: a red build can be repeated.
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True, database=None, print_blob=True)
# A long search for new examples: pytest --hypothesis-profile=nightly
settings.register_profile("nightly", parent=settings.get_profile("default"), max_examples=2_000, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--traces",
        type=Path,
        default=REPOSITORY.parent / "shared" / "traces",
        help="folder of the public request traces (default: ../shared/traces beside the repository)",
    )
    parser.addoption("--page-images", type=Path, help="folder that images of the web page are made in (default: none are made)")
    parser.addoption("--thorough", action="store_true", help="all seeds and examples, and soaks of half a minute")
    parser.addoption(
        "--plain-daemons", action="store_true", help="every daemon imports its modules itself (see tests/nursery.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--thorough"):
        be_thorough()
        most = max(settings.default.max_examples, ALL_EXAMPLES)
        settings.register_profile("thorough", parent=settings.default, max_examples=most)
        settings.load_profile("thorough")
    if not config.getoption("--plain-daemons"):
        nurseries = Nurseries()
        Children.launcher, Children.engines = nurseries, nurseries.serve
        config.add_cleanup(nurseries.close)


@pytest.fixture(scope="session")
def traces(pytestconfig: pytest.Config) -> Path:
    """The folder of request traces; tests that need it are skipped where it is missing."""
    folder: Path = pytestconfig.getoption("--traces")
    if not folder.is_dir():
        pytest.skip(f"no request traces in {folder}: name their folder with --traces")
    return folder


def _cuda_device_count() -> int:
    """CUDA devices that the driver shows, without importing torch."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
    rank = {name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
    for item in items:
        if (REPOSITORY / "tests" / "netlab") in item.path.parents:
            item.add_marker(pytest.mark.alone)
        elif item.get_closest_marker("alone"):
            raise pytest.UsageError(f"{item.nodeid}: what must run alone lies in tests/netlab, and is collected there only")
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting and not _cuda_device_count():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
