"""Shared by all tests: command-line options, hypothesis profiles, the order of files, and the skip of ``gpu`` tests."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from file_times import TimeRecorder, read_times, start_order
from kvstore.embedded.children import DaemonLaunchers
from kvstore.observe import counters
from kvstore.process.gc_tuning import freeze_startup_objects
from nursery import Nurseries
from samples import be_thorough
from support.unexpected_errors import fail_on_unexpected_errors

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLES, ALL_EXAMPLES = 40, 100
"""Hypothesis examples per test that sets no number, without and with ``--thorough``."""

# Otherwise garbage collections walk all modules and tests again and again. Called once more when the tests are collected.
freeze_startup_objects()

# A test that counts under an undeclared metric name fails.
counters.strict = True

# NumPy's threads for linear algebra spin after each start of a process, and nothing here multiplies large matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Tests start daemons while other threads are inside gRPC. Its fork handlers are useless before an exec, and one aborted a child
# before its first log line.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Examples are not timed, since machines differ in speed: pytest-timeout bounds the test.
settings.register_profile("default", deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
# The same examples in every run, so that a failed build can be repeated.
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
    parser.addoption("--page-images", type=Path, help="write screenshots of the web page into this folder")
    parser.addoption("--thorough", action="store_true", help="run all seeds and examples, and soaks of half a minute")
    parser.addoption("--plain-daemons", action="store_true", help="start every daemon as a user would (see tests/nursery.py)")
    parser.addoption("--record-models", action="store_true", help="record in docs/reference/models.json which models were served")
    parser.addoption("--record-times", action="store_true", help="record the seconds per test file in tests/file_times.json")


def pytest_configure(config: pytest.Config) -> None:
    fail_on_unexpected_errors()
    if config.getoption("--thorough"):
        be_thorough()
        most = max(settings.default.max_examples, ALL_EXAMPLES)
        settings.register_profile("thorough", parent=settings.default, max_examples=most)
        settings.load_profile("thorough")
    if config.getoption("--record-times") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(TimeRecorder())
    if not config.getoption("--plain-daemons"):
        folder, owner = getattr(config, "workerinput", {}).get("nurseries", (None, None))
        nurseries = Nurseries(folder and Path(folder), owner)
        DaemonLaunchers.launcher, DaemonLaunchers.engines = nurseries, nurseries.serve
        Nurseries.current = nurseries
        config.add_cleanup(nurseries.close)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node: Any) -> None:
    """Let a worker share the nurseries of this run."""
    if Nurseries.current is not None:
        node.workerinput["nurseries"] = (str(Nurseries.current.folder), Nurseries.current.owner)


def pytest_collection_finish() -> None:
    freeze_startup_objects()


@pytest.fixture(scope="session")
def traces(pytestconfig: pytest.Config) -> Path:
    """Folder of request traces. Tests that need it are skipped if it is missing."""
    folder: Path = pytestconfig.getoption("--traces")
    if not folder.is_dir():
        pytest.skip(f"no request traces in {folder}: name their folder with --traces")
    return folder


def _cuda_device_count() -> int:
    """Return the number of CUDA devices that the driver reports, without importing torch."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
    rank = start_order({item.location[0] for item in items}, read_times())
    items.sort(key=lambda item: rank[item.location[0]])
    for item in items:
        if (REPOSITORY / "tests" / "netlab") in item.path.parents:
            item.add_marker(pytest.mark.alone)
        elif item.get_closest_marker("alone"):
            raise pytest.UsageError(f"{item.nodeid}: tests marked 'alone' belong in tests/netlab")
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting and not _cuda_device_count():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
