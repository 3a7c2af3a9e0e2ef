"""Stores, whole or layer by layer."""
