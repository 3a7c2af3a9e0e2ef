"""Conformance of any KV connector of vLLM: seeded faults in its storage, and whether tokens stay those of the engine alone."""
