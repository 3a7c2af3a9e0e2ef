"""gRPC waits in the threads of its callers in the metadata server; whoever is a client keeps gRPC's own way."""

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


def test_it_is_chosen_once_before_grpc_is_there_and_nobody_inherits_it() -> None:
    assert run(_CHOSE, _SAY, _CHOSE) == ["True", "None", "False"]


@pytest.mark.parametrize("chosen", ["", "-event_engine_client"])
def test_who_has_chosen_is_left_alone(chosen: str) -> None:
    assert run(_CHOSE, _SAY, GRPC_EXPERIMENTS=chosen) == ["False", *chosen.split()]


def test_grpc_that_was_imported_before_is_left_alone() -> None:
    assert run("import grpc", _CHOSE) == ["False"]


_WATCH = ("import kvstore.rpc.grpc_io_mode as io", "seen = []", "io.import_module = seen.append")


def test_the_metadata_server_chooses() -> None:
    assert run(*_WATCH, "from kvstore.cli.app import root; root.get_command(None, 'metadata')", "print(*seen)")[-1:] == ["grpc"]


@pytest.mark.parametrize(
    "first",
    ["from kvstore.cli.app import root; root.get_command(None, 'node')", "from kvclient import KVClient"],
)
def test_clients_do_not(first: str) -> None:
    """A connection that is lost would be made again only while somebody waits in a call."""
    assert run(*_WATCH, first, "print(len(seen))")[-1:] == ["0"]


def test_values_of_the_client_load_no_grpc() -> None:
    assert run("from kvclient import CacheSpec", "import sys; print('grpc' in sys.modules)") == ["False"]
