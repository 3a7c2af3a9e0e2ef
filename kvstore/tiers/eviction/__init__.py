"""Eviction policies and their data structures. Pure: no locks, no clock, no I/O."""
