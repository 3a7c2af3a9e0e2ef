"""``kvstore events``: the metadata server's block events for those who speak vLLM's KV-event format over ZeroMQ."""
