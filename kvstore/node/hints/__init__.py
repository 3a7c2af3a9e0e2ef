"""Hints of applications: which sessions go on, and which have ended."""
