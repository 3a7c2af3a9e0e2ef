"""Handoff of a prompt from a prefill engine to the host of a decode engine."""
