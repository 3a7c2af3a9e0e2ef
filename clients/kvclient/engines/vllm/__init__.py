"""The vLLM connector: prefixes that any engine computed are loaded from the store, and new blocks are stored.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvclient.engines.vllm.connector",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"metadata": "127.0.0.1:7400"}}'

``connector`` is the facade that vLLM talks to, ``scheduler_side`` decides (which blocks are loaded and stored in each step),
``worker_side`` moves (pages from and to the store, in the background); what passes between them is a ``plan``.
Only ``connector``, ``engine_view`` and ``metrics`` know vLLM's types.
"""
