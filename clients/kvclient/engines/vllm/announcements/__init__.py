"""What an engine tells routers about blocks that it stored: KV events through vLLM's publisher, and labels in the store."""
