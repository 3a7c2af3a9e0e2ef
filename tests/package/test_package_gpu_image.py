"""The targets for a GPU run without git, with torch, NumPy and the packages of ``requirements-gpu.txt`` alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

import fetch_gpu_wheels
import pytest
from bare_environment import REPOSITORY, declared, link, site_packages

import report

IMAGE = ("torch", "numpy")
"""Packages of an image for a GPU. Their requirements are linked, too."""
RUN_S = 150
LIST = (REPOSITORY / "requirements-gpu.txt").read_text(encoding="utf-8")
NAMES = [line for line in LIST.splitlines() if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with links to these packages."""
    folder = tmp_path_factory.mktemp("image")
    venv.create(folder, with_pip=False, symlinks=True)
    for name in (*IMAGE, *NAMES):
        package = distribution(name)
        for needed in (package, *(declared(package, ()) if name in IMAGE else ())):
            link(needed, site_packages(folder))
    return folder


def make(target: str, image: Path, **variables: str) -> str:
    """Run a GPU target without a GPU, git or wheels, and return its output."""
    programs = image / "programs"
    programs.mkdir(exist_ok=True)
    for name in ("bash", "grep", "sort", "make", "cc"):
        if not (programs / name).exists() and (found := shutil.which(name)):
            (programs / name).symlink_to(found)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "PYTHON", "PYTEST", "MAKE"))}
    environment = {**kept, "PATH": str(programs), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    given = {
        "GPU_PYTHON": str(image / "bin" / "python"),
        "GPU_WHEELS": "none",
        "GPU_SITE": "none",
        "NEED_CUDA": "pass",
        "TEST_ARGS": "",  # a surrounding make may export its own
        **variables,
    }
    command = ["make", target, *(f"{name}={value}" for name, value in given.items())]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_gpu_tests_are_collected_on_a_bare_image(image: Path) -> None:
    output = make("test-gpu", image)
    assert re.search(r"\d{3} skipped, \d+ deselected in", output), output
    assert "test_device_gpu.py" in output
    assert "test_vllm_gpu.py" in output
    assert not re.search(r"\d+ (passed|failed|error)", output), output


def test_gpu_benchmarks_keep_records_on_a_bare_image(image: Path, tmp_path: Path) -> None:
    make(
        "bench-gpu",
        image,
        BENCH_ARGS=f"--smoke --device cpu --only copies --only client --results {tmp_path} --scratch {tmp_path}",
    )
    records = report.read_records(tmp_path)
    assert {record.figure for record in records} == {
        *("gpu_load", "gpu_store", "gpu_client_load", "gpu_client_store", "gpu_step_p50", "gpu_step_p99"),
    }
    for record in records:
        assert record.commit == ""
        assert record.versions["grpcio"]
        assert "torch" in record.notes
        assert "ON THE CPU" in record.notes
    assert {record.parameters["layout"] for record in records} == {"split", "page", "block-major"}


def test_other_gpu_benchmarks_import_on_a_bare_image(image: Path) -> None:
    code = "import sys; sys.path.insert(0, 'benchmarks'); import gds_read, hbm_pool, rig.gds_child"
    environment = {"PATH": "", "PYTHONPATH": os.pathsep.join((".", "clients", "proto"))}
    python = str(image / "bin" / "python")
    subprocess.run([python, "-c", code], cwd=REPOSITORY, env=environment, check=True, capture_output=True, timeout=RUN_S)


def test_wheels_for_a_gpu_machine_are_pinned(tmp_path: Path) -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    }
    assert {name.lower() for name in NAMES} <= pinned
    command = fetch_gpu_wheels.download_command("3.12", tmp_path)
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--platform=manylinux_2_17_x86_64"} <= set(command)
