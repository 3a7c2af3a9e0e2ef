"""Compute quota: a scheduler class for vLLM that bounds the attention time of a step."""
