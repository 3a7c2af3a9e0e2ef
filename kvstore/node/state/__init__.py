"""State of a node's blocks: the model, the change log, the invariants."""
