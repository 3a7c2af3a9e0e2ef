"""Stubs of the package kvstore.v1."""
