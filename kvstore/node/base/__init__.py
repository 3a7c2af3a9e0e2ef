"""Parts of a node without knowledge of blocks: cancellation, stall detection, guarded volume I/O."""
