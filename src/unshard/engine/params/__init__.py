"""Parameters of a unit: shards, unsharded parameters, dtype casts, offload, and which parameters the modules hold."""
