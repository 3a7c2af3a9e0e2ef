"""What the store is held against: each module runs one peer on this machine, in the same run as our own measurement."""
