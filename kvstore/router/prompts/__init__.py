"""Prompts: the parsed request body, and estimates of which engines have a prompt's prefix in cache."""
