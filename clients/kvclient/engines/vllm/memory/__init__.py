"""The engine's KV cache pages as memory of blocks, on the host or on a device."""
