"""Seeing into the store."""
