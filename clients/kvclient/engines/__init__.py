"""Hooks by which inference engines use the store: one package an engine, each loaded only by who names it."""
