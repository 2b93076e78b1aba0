"""Our name for `torch.distributed._composable`: the call that PyTorch has removed."""

from ..composable import fully_shard

__all__ = ["fully_shard"]
