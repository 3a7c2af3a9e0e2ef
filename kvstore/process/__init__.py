"""Process-level services of daemons and tools, except RPC: shutdown, resource limits, defaults from the host, small files."""
