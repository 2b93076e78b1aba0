"""`torch.distributed.fsdp.sharded_grad_scaler`."""

from ...optim.sharded_grad_scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
