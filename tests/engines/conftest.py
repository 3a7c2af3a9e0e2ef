"""What tests with real engines share. They run in their own environment (``make test-engines``) and are skipped elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before any engine is imported: no hub, no telemetry, one thread each, engines in this process where a test asks for no other.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))  # engines warn of much that is not ours
