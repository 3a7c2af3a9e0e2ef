"""Identity of an engine's KV: facts of the engine, namespaces, weights and block keys."""
