"""What a node knows of its blocks: the model, the change log, the invariants."""
