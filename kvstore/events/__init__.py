"""``kvstore events``: publishes block events of the metadata server in vLLM's KV-event format over ZeroMQ."""
