"""`torch.distributed.fsdp._init_utils`."""

from ...frontends.wrapper_api import ShardingStrategy

__all__ = ["HYBRID_SHARDING_STRATEGIES", "ShardingStrategy"]

HYBRID_SHARDING_STRATEGIES = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]
