"""Memory that a client copies from and to: the engine's buffers, the node's arena, device memory, the engine's own pool."""
