"""Reads ahead of loads."""
