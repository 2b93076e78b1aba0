"""`FullyShardedDataParallel` and the legacy composable call."""
