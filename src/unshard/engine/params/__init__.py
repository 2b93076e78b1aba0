"""Parameters of a unit: shards, unsharded parameters, the swap on modules, casts, offload."""
