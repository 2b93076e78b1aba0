"""Parameters of a unit: shards, unsharded buffers, the swap on modules, dtypes, offload."""
