"""From the shard to the unsharded parameters."""
