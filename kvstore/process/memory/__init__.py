"""Memory of the host and of processes, and shared mappings."""
