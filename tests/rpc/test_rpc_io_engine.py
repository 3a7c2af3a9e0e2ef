"""In the metadata server gRPC polls in its callers' threads; clients keep gRPC's default."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SAY = "import os; print(os.environ.get('GRPC_EXPERIMENTS'))"
_CHOSE = "from kvstore.rpc.grpc_io_mode import wait_in_callers_threads as wait; print(wait())"


def run(*lines: str, **environment: str) -> list[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], env=inherited | environment, capture_output=True, text=True, check=True
    )
    assert "Unknown experiment" not in done.stderr, done.stderr
    return done.stdout.split()


def test_io_mode_set_before_import_is_not_inherited() -> None:
    assert run(_CHOSE, _SAY, _CHOSE) == ["True", "None", "False"]


@pytest.mark.parametrize("chosen", ["", "-event_engine_client"])
def test_io_mode_set_by_user_is_kept(chosen: str) -> None:
    assert run(_CHOSE, _SAY, GRPC_EXPERIMENTS=chosen) == ["False", *chosen.split()]


def test_io_mode_after_grpc_import_is_kept() -> None:
    assert run("import grpc", _CHOSE) == ["False"]


_WATCH = ("import kvstore.rpc.grpc_io_mode as io", "seen = []", "io.import_module = seen.append")


def test_metadata_server_sets_io_mode() -> None:
    assert run(*_WATCH, "from kvstore.cli.app import root; root.get_command(None, 'metadata')", "print(*seen)")[-1:] == ["grpc"]


@pytest.mark.parametrize(
    "first",
    ["from kvstore.cli.app import root; root.get_command(None, 'node')", "from kvclient import KVClient"],
)
def test_clients_do_not_set_io_mode(first: str) -> None:
    """With that mode a lost connection is restored only while a call waits."""
    assert run(*_WATCH, first, "print(len(seen))")[-1:] == ["0"]


def test_client_values_import_without_grpc() -> None:
    assert run("from kvclient import CacheSpec", "import sys; print('grpc' in sys.modules)") == ["False"]
