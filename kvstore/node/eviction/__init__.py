"""Eviction: which blocks leave the arena and the volumes, and why."""
