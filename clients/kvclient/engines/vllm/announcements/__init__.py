"""Announcements of stored blocks to routers: KV events through vLLM's publisher, and labels in the store."""
