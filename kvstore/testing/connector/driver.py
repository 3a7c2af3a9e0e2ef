"""Interface that a hook implements so that the connector conformance kit can drive it.

A hook (the part of the store inside an engine) is tested through a driver: a small object that opens engines with the hook. It
is created in the test's process and in child processes, so it is a picklable value (a frozen dataclass of paths and numbers)::

    @dataclass(frozen=True)
    class MyDriver:
        model: Path
        block_tokens: int = 32

        def open(self, store: StoreAddress | None, options: Mapping[str, object]) -> HookEngine: ...

    class TestMyHook(ConnectorSuite):          # kvstore.testing.connector.suite
        @classmethod
        def make_driver(cls, folder: Path) -> HookDriver:
            return MyDriver(make_model(folder / "model"))

The main rule: with any failure of the store, the tokens are those of the engine alone. The suite tests it in a dozen cases, and
``python -m kvstore.testing.connector.soak`` in any number of seeded runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Addresses of the store.

    Attributes:
        metadata: address of the metadata server.
        node: address of this host's node; see ``HookOptions.node``.
    """

    metadata: str
    node: str = "auto"


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """An answer.

    Attributes:
        tokens: the greedy tokens. A hook without an engine may give whatever is computed from all KV bytes of the prompt and
            changes with any of them.
        loaded_tokens: leading tokens of the prompt whose KV came from the store; not those that the engine itself had cached.
    """

    tokens: tuple[int, ...]
    loaded_tokens: int = 0


class HookEngine(Protocol):
    """An engine with a hook in it. Used by one thread at a time."""

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[EngineAnswer]:
        """Return greedy answers to prompts, in order; computed in one batch if the engine can.

        Args:
            prompts: token ids, each below 256.
            max_tokens: exact number of tokens generated per prompt.
        """

    def flush(self, timeout_s: float) -> bool:
        """Wait until all generated KV is stored or given up. False: not in time."""

    def forget(self) -> None:
        """Drop the engine's own cache, so that only the store has KV."""

    def counters(self) -> Mapping[str, int]:
        """Totals by name, including all failures."""

    def close(self) -> None:
        """Stop the engine."""


@runtime_checkable
class AbortingEngine(Protocol):
    """An engine whose requests can be aborted. Optional: the seeded runs then abort some."""

    def abort(self, prompts: Sequence[Sequence[int]], max_tokens: int, steps: int) -> None:
        """Begin to answer prompts, and abort them after some steps of the engine, or earlier if all are answered."""


class HookDriver(Protocol):
    """Opens engines, one at a time in each process. Picklable: engines are opened in child processes, too."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""

    def open(self, store: StoreAddress | None, options: Mapping[str, object]) -> HookEngine:
        """Open a new engine with an empty cache.

        Args:
            store: addresses of the store; None: the engine alone, without the hook; its answers are the reference.
            options: further options common to all hooks (fields of ``HookOptions``), such as ``verify`` or ``load_deadline_s``.
        """
