"""Typed configuration of all programs, with the source of every value."""
