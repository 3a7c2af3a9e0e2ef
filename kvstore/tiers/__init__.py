"""Places that hold blocks: the DRAM arena and the NVMe slab, and the pure parts that share out and free space."""
