"""`torch.distributed._composable`: the legacy call."""

from ..composable import fully_shard

__all__ = ["fully_shard"]
