"""All-gathers: from the shard to the unsharded parameters."""
