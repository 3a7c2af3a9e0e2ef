"""Hooks that connect inference engines to the store: one package per engine, imported only on use."""
