"""Findings on servers that run: daemons of this store, and the servers of its index."""
