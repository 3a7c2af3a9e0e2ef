"""A built wheel runs in an environment that holds its declared dependencies alone, without a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import build_kernel
import pytest
from bare_environment import REPOSITORY, add_extra, build_packages, copied_tree, install_wheel
from docs_site.included import DOCS
from page_session import Session, steps

import kvstore

DEMO_S = 180
STORE_AND_LOAD = """
import tempfile
import numpy as np
from pathlib import Path
from kvclient import KVClient
from kvstore.core.spec import CacheSpec
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.native import kernel_name

spec = CacheSpec(model="m", block_tokens=16, layers=4, layer_block_bytes=16384)
data = np.random.default_rng(1).integers(0, 256, (8, spec.block_bytes), np.uint8)
with tempfile.TemporaryDirectory(dir="/tmp") as folder, LocalCluster([NodeSpec("a", dram_bytes=16 << 20)], Path(folder)) as store:
    hits = []
    for node in (store.node("a").local_socket, None):  # out of shared memory, and over TCP
        with KVClient.connect(store.metadata_address, spec, node=node) as client:
            keys = client.keys(np.arange(128, dtype=np.uint32))
            if not hits:
                client.store(keys, data, wait_visible=True)
            out = np.zeros_like(data)
            hits.append(client.load(client.lookup(keys), out, verify="always").hit_blocks)
            assert (out == data).all()
print(kernel_name(), *hits)
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_packages(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def bare(packages: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and its declared dependencies, without extras."""
    folder = tmp_path_factory.mktemp("bare")
    install_wheel(packages[0], folder)
    return folder


def run(program: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "PYTHON"))}
    environment |= {"HOME": str(folder), "PYTHONWARNINGS": "error::ImportWarning"}
    return subprocess.run(
        [str(program), *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=DEMO_S, check=False
    )


def test_wheel_contains_runtime_files_alone(packages: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(packages[0]) as wheel:
        names = set(wheel.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"kvstore", "kvclient", "kvproto"}
    assert not any(name.startswith("kvstore/lab/") for name in names)
    assert "kvstore/admin/alerts.md" in names
    for root, prefix in (("kvstore", "kvstore"), ("clients/kvclient", "kvclient")):
        for path in (REPOSITORY / root).rglob("*"):
            if path.suffix in {".py", ".html", ".js", ".css", ".typed"} and "lab" not in path.parts:
                assert f"{prefix}/{path.relative_to(REPOSITORY / root).as_posix()}" in names


def test_wheel_contains_native_kernel(packages: tuple[Path, Path]) -> None:
    """Only if there is a compiler; otherwise it is a wheel for any machine."""
    with zipfile.ZipFile(packages[0]) as wheel:
        native = "kvstore/native/_kernel.so" in wheel.namelist()
    assert native == (build_kernel.compiler() is not None)
    assert native != packages[0].name.endswith("-any.whl")


def test_wheel_without_compiler_stores_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "")
    wheel, _ = build_packages(tmp_path, out_of=copied_tree(tmp_path / "tree"))
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as files:
        assert "kvstore/native/kernel.c" in files.namelist()
        assert "kvstore/native/_kernel.so" not in files.namelist()
    programs = install_wheel(wheel, tmp_path / "venv")
    done = run(programs / "python", "-c", STORE_AND_LOAD, folder=tmp_path)
    assert done.stdout.split() == ["python", "8", "8"], done.stdout + done.stderr


def cross_tree(folder: Path) -> tuple[Path, Path]:
    """A copy of the tree with a kernel, as in a checkout. Returns the tree and the kernel."""
    tree = copied_tree(folder)
    shutil.copy(REPOSITORY / ".gitignore", tree)
    library = tree / "kvstore" / "native" / "_kernel.so"
    library.write_bytes(b"of this machine")
    return tree, library


def test_wheel_cross_compiler_fails_build_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, library = cross_tree(tmp_path / "tree")
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("KVSTORE_WHEEL_PLATFORM", "manylinux_2_17_aarch64")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        build_packages(tmp_path, out_of=tree)
    assert b"no kernel for manylinux_2_17_aarch64" in caught.value.stderr
    assert not list(tmp_path.glob("*.whl"))
    assert library.read_bytes() == b"of this machine"


@pytest.mark.skipif(build_kernel.compiler() is None, reason="no C compiler here")
def test_wheel_of_another_platform_leaves_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, library = cross_tree(tmp_path / "tree")
    monkeypatch.setenv("KVSTORE_WHEEL_PLATFORM", "manylinux_2_17_x86_64")
    wheel, _ = build_packages(tmp_path, out_of=tree)
    assert wheel.name.endswith("-py3-none-manylinux_2_17_x86_64.whl")
    with zipfile.ZipFile(wheel) as files:
        assert files.namelist().count("kvstore/native/_kernel.so") == 1
        assert files.read("kvstore/native/_kernel.so")[:4] == b"\x7fELF"
    assert library.read_bytes() == b"of this machine"


def test_sdist_contains_tests_and_pins(packages: tuple[Path, Path]) -> None:
    with tarfile.open(packages[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "constraints.txt", "Makefile", "tests/conftest.py", "docs/tutorial.md", "LICENSE"} <= names


def test_wheel_demo_in_bare_environment_succeeds(bare: Path, tmp_path: Path) -> None:
    programs = bare / "bin"
    assert run(programs / "kvstore", "--version", folder=tmp_path).stdout.split()[-1] == kvstore.__version__
    where = run(programs / "python", "-c", "import kvstore, kvclient; print(kvstore.__file__)", folder=tmp_path)
    assert where.stdout.startswith(str(bare)), where.stderr
    undeclared = run(programs / "python", "-c", "import fastapi", folder=tmp_path)
    assert "ModuleNotFoundError" in undeclared.stderr
    demo = run(programs / "kvstore", "demo", "--sessions", "3", "--turns", "8", folder=tmp_path)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stdout.endswith("No wrong byte: each loaded byte was compared with the stored one. Next: kvstore up\n")


@pytest.mark.parametrize(
    ("extra", "program"),
    [
        ("router", "import kvstore.router.main, kvstore.router.routes"),
        ("admin", "import kvstore.admin.app"),
        ("events", "import kvstore.events.main, zmq, msgspec"),
        ("observe", "import opentelemetry.sdk.trace, opentelemetry.exporter.otlp.proto.http.trace_exporter"),
    ],
)
def test_wheel_extra_is_complete(bare: Path, tmp_path: Path, extra: str, program: str) -> None:
    done = run(add_extra(bare, tmp_path / "venv", extra), "-c", program, folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_wheel_tutorial_can_be_followed(packages: tuple[Path, Path], tmp_path: Path) -> None:
    programs = install_wheel(packages[0], tmp_path / "venv", ["admin"])
    folder = tmp_path / "reader"
    folder.mkdir()
    with Session(folder, installed=programs) as session:
        for step in steps(DOCS / "tutorial.md"):
            session.follow(step)
