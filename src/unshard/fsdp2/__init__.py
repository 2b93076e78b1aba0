"""`fully_shard`: from its arguments to units of the engine."""
