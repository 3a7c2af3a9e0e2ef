"""Memory: what the host has, what a process needs, and shared mappings."""
