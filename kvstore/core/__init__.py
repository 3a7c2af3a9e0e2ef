"""Vocabulary of all packages: keys, types, errors, limits. Pure: no I/O, no torch."""
