"""`torch.distributed.fsdp._init_utils`."""

from ...frontends.wrapper_groups import MEANING

HYBRID_SHARDING_STRATEGIES = [each for each, meaning in MEANING.items() if meaning.cuts and meaning.replicates]
NO_RESHARD_AFTER_FORWARD_STRATEGIES = (
    *(each for each, meaning in MEANING.items() if meaning.cuts and not meaning.frees_after_forward),
)

__all__ = ["HYBRID_SHARDING_STRATEGIES", "NO_RESHARD_AFTER_FORWARD_STRATEGIES"]
