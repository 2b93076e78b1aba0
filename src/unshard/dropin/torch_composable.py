"""The names that the drop-in adds to `torch.distributed._composable`, from which PyTorch removed this call.

A module of its own, like its neighbours: other test beds look up the names of a torch module here.
"""

from ..composable import fully_shard

__all__ = ["fully_shard"]
