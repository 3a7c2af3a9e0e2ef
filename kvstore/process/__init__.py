"""Process-level services of daemons and tools that are no RPC: shutdown, resource limits, defaults from the host, small files."""
