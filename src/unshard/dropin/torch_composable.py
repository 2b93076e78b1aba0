"""The `fully_shard` for `torch.distributed._composable`. PyTorch has removed its own function of this name.

This file is separate because `torch.distributed._composable.fsdp` has a different function with this name.
"""

from ..composable import fully_shard

__all__ = ["fully_shard"]
