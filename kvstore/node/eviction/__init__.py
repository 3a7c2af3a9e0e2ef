"""Eviction: the choice of blocks to evict from the arena and the volumes."""
