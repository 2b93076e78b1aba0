"""`fully_shard`, which converts its arguments to a unit of the engine, and `FSDPModule`."""
