"""What the KV of an engine is: facts of the engine, namespaces, the weights epoch and block keys."""
