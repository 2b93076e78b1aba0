"""`fully_shard` and `FSDPModule`. Each call of `fully_shard` creates one unit of the engine."""
