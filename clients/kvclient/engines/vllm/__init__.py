"""The vLLM connector: loads prefixes that any engine computed from the store, and stores new blocks.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvclient.engines.vllm.connector",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"metadata": "127.0.0.1:7400"}}'

``connector`` (and ``pd_connector``, for prefill/decode disaggregation) is the facade that vLLM loads. ``scheduler`` decides which
blocks are loaded and stored in each step. It sends a ``plan`` to ``worker``, which moves pages. ``identity`` identifies the
engine's KV; ``memory`` locates it. Only the facades, ``identity.engine_facts`` and ``metrics`` import vLLM.
"""
