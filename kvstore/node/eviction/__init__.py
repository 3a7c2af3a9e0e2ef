"""Eviction from the arena and the volumes: which blocks leave, and the commits by which they leave."""
