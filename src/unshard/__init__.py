"""Trains PyTorch models that do not fit one device: parameters, gradients and optimizer state cut over the ranks."""

from .comm.plugin import AllGather, Comm, ReduceScatter
from .errors import UnshardError
from .frontends.fully_shard import fully_shard
from .frontends.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "UnshardError",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

__version__ = "0.1.0"
