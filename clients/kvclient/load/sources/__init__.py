"""Sources of blocks that a load reads from, nearest first."""
