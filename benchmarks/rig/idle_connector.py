"""A connector for vLLM that does nothing: the least that any connector costs the engine."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class IdleConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Finds no hits and stores no blocks."""

    def start_load_kv(self, *_given: Any, **_named: Any) -> None:  # noqa: ANN401  # vLLM's signatures
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is awaited."""

    def save_kv_layer(self, *_given: Any, **_named: Any) -> None:  # noqa: ANN401
        """Nothing is stored."""

    def wait_for_save(self) -> None:
        """Nothing is awaited."""

    def get_num_new_matched_tokens(self, *_given: Any) -> tuple[int, bool]:  # noqa: ANN401
        """Find nothing."""
        return 0, False

    def update_state_after_alloc(self, *_given: Any) -> None:  # noqa: ANN401
        """Keep no state."""

    def build_connector_meta(self, _scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ANN401
        """Send nothing to the workers."""
        return KVConnectorMetadata()
