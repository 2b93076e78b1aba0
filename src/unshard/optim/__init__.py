"""What happens between backward and the end of the optimizer's step, for parameters that are sharded."""

from .clip import clip_grad_norm_
from .flat import flat
from .grad_scaler import GradScaler
from .sharded_grad_scaler import ShardedGradScaler

__all__ = ["GradScaler", "ShardedGradScaler", "clip_grad_norm_", "flat"]
