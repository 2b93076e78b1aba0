"""Our `fully_shard` for `torch.distributed._composable`, from which PyTorch removed its own.

This file is separate because `torch.distributed._composable.fsdp` has another function with this name.
"""

from ..composable import fully_shard

__all__ = ["fully_shard"]
