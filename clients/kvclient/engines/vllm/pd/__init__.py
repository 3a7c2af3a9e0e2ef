"""Prefill/decode disaggregation: prompts that one engine computes and another one continues."""
