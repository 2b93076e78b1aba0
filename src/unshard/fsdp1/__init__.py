"""`FullyShardedDataParallel`, and the implementation of `composable.fully_shard`."""
