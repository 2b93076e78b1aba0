"""Flat optimizers, gradient clipping and gradient scalers for sharded parameters."""

from .clip import clip_grad_norm_
from .flat_optimizer import flat
from .grad_scaler import GradScaler, ShardedGradScaler

__all__ = ["GradScaler", "ShardedGradScaler", "clip_grad_norm_", "flat"]
