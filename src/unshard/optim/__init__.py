"""What happens to gradients between backward and the optimizer's step, for parameters that are sharded."""

from .clip import clip_grad_norm_
from .grad_scaler import GradScaler

__all__ = ["GradScaler", "clip_grad_norm_"]
