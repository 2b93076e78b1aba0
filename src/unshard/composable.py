"""The legacy composable call: `fully_shard(module, mixed_precision=MixedPrecision(...))`."""

from .frontends.legacy import fully_shard

__all__ = ["fully_shard"]
