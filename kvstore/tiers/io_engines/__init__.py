"""I/O engines of the slab: how a slab file's bytes get into memory. ``posix`` always; ``gds`` (kvikio) where it is real."""
