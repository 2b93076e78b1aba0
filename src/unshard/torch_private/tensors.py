"""Private APIs of tensors, storages, DTensors, `ShardedTensor` and modules."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as ShardOfTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor as ShardedTensor
from torch.distributed._shard.sharded_tensor import ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.modules import module as all_modules
from torch.optim import optimizer as all_optimizers
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

# -- nested containers -------------------------------------------------------------------------------------

# Torch flattens arguments with these functions, and programs register their own classes for them.
tree_flatten = _pytree.tree_flatten
tree_unflatten = _pytree.tree_unflatten
tree_map = _pytree.tree_map

# -- tensors and storages ----------------------------------------------------------------------------------

# Each call handles many tensors. These functions are documented, and `torch.optim` uses them, despite the underscores.
foreach_copy = torch._foreach_copy_
foreach_add = torch._foreach_add_
foreach_div = torch._foreach_div_
foreach_zero = torch._foreach_zero_
foreach_mul = torch._foreach_mul_
foreach_norm = torch._foreach_norm
unscale_and_check = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiply tensors of one dtype by a factor, and set a flag if any element is not finite.

Torch's gradient scaler uses this function.
"""


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


# Called for every parameter in every step, so not a Python function.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Return a tensor's version counter, which grows with every in-place write."""
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
"""Return the base of a view, or None if autograd does not track the tensor as a view."""


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` has hooks that were added with `register_hook`."""
    return bool(tensor._backward_hooks)


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and Python objects share `storage`."""
    return torch._C._storage_Use_Count(storage._cdata)


# Called for every unit in every step, so not a Python function.
storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Return a number that identifies a storage, even an empty one.

`id()` does not identify a storage, because torch may create several Python objects for it.
"""


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that `tensor` wraps, or an empty list if it wraps none.

    A subclass such as DTensor wraps the tensors that hold its data. A transform such as `torch.func.grad` wraps the
    tensors that it is applied to.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return [torch._C._functorch.get_unwrapped(tensor)]
    if hasattr(type(tensor), "__tensor_flatten__"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # type: ignore[attr-defined]
        return [each for each in parts if isinstance(each, torch.Tensor)]  # some subclasses also name other attributes
    return []


def chunk_cat_into(out: torch.Tensor, tensors: list[torch.Tensor], chunks: int) -> None:
    """Split each tensor into `chunks` chunks along dim 0, and write chunk i of every tensor to row i of `out`.

    Shorter chunks are padded with zeros. `out` has the shape (chunks, sum of padded chunk sizes). On CUDA, this is one
    kernel, and the only cast that it supports is from bf16 to fp32. Other casts use a temporary tensor. No public torch
    operation pads and interleaves in one call.
    """
    dtype = tensors[0].dtype
    if dtype == out.dtype or (dtype == torch.bfloat16 and out.dtype == torch.float32):
        torch._chunk_cat(tensors, dim=0, num_chunks=chunks, out=out)
    else:
        out.copy_(torch._chunk_cat(tensors, dim=0, num_chunks=chunks))


# -- DTensors ----------------------------------------------------------------------------------------------

# Called for every parameter in every step, so not Python functions.
local_of: Callable[[torch.Tensor], torch.Tensor] = attrgetter("_local_tensor")
"""Return a DTensor's own local tensor. The public `to_local()` may return a new view instead."""
spec_of: Callable[[torch.Tensor], DTensorSpec] = attrgetter("_spec")
"""Return a DTensor's spec, which contains its mesh and placements. Each public property takes two lookups."""


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor that shares the memory of `tensor`.

    Return `tensor` itself if it is a plain tensor, or if its class has its own `__torch_dispatch__`.
    This function disables `__torch_function__`, with which `detach` would return an instance of the subclass.
    """
    if type(tensor) is torch.Tensor or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor. Return any other tensor itself."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def set_local_tensor(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Replace the local tensor of a DTensor, in place."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def make_dtensor(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """Return a DTensor whose local tensor is `local` itself. The DTensor's global strides are contiguous.

    The public `DTensor.from_local` creates a view, so callers could not check later whether the DTensor still holds
    `local`.
    """
    meta = TensorMeta(shape, contiguous_stride(shape), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    dtensor = DTensor(_without_offset(local), spec, requires_grad=False)
    set_local_tensor(dtensor, local)
    return dtensor


def make_gradient(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """Return a DTensor as `make_dtensor` does, but with the storage offset of `local`.

    `torch.compile` creates a fake DTensor from the fake local tensor, and fails if its offset differs from the offset
    of the real DTensor. However, torch can neither copy nor save a DTensor with a nonzero offset. So such a DTensor
    gets its own `__deepcopy__` and `__reduce_ex__`, which copy only the elements of `local`.
    """

    def copied() -> DTensor:
        return make_dtensor(local.detach().clone(), mesh, placements, shape)

    dtensor = DTensor(local, make_dtensor(local, mesh, placements, shape)._spec, requires_grad=False)
    if dtensor.storage_offset():
        vars(dtensor)["__deepcopy__"] = lambda memo: copied()
        vars(dtensor)["__reduce_ex__"] = lambda protocol: copied().__reduce_ex__(protocol)
    return dtensor


def make_sharded_parameter(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, requires_grad: bool
) -> nn.Parameter:
    """Return a parameter that is a DTensor whose local tensor is `local` itself.

    `nn.Parameter` creates a new local tensor, so this function replaces the new tensor with `local`.
    """
    parameter = nn.Parameter(make_dtensor(_without_offset(local), mesh, placements, shape), requires_grad)
    set_local_tensor(parameter, local)
    return parameter


def _hash_local_shapes() -> None:
    """Add the local shape to the hash that inductor's on-disk cache uses for a DTensor.

    Without the local shape, a rank could load a graph that another rank has compiled for a shard of a different size.
    The graph would then fail. Torch 2.12 to 2.15 have this hash.
    """
    torch_hash = DTensor._stable_hash_for_caching

    def with_local_shape(dtensor: DTensor) -> str:
        return f"{torch_hash(dtensor)}{tuple(local_of(dtensor).shape)}"

    DTensor._stable_hash_for_caching = with_local_shape  # type: ignore[method-assign,assignment]


if hasattr(DTensor, "_stable_hash_for_caching"):
    _hash_local_shapes()


def _without_offset(local: torch.Tensor) -> torch.Tensor:
    """Return `local`, or a placeholder of its shape and dtype if `local` is a plain tensor with a storage offset.

    A DTensor takes the storage offset of the tensor that it is created from. If this offset is not 0, torch can neither
    copy nor save the DTensor.
    """
    if type(local) is not torch.Tensor or local.storage_offset() == 0:
        return local
    return local.new_empty(()).expand(local.shape)


def dtensor_of(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor with the spec `spec`, which can be assigned to the `.data` of another DTensor."""
    return DTensor(_without_offset(local), spec, requires_grad=False)


def as_dtensor(local: torch.Tensor, spec: DTensorSpec | None) -> torch.Tensor:
    """Return a DTensor whose local tensor is `local`, or return `local` itself if `spec` is None."""
    return local if spec is None else DTensor(local, spec, requires_grad=False)


def strided_shard(dim: int, factor: int) -> Placement:
    """Return a placement that shards `dim`, which later mesh dimensions have already split into `factor` chunks."""
    return _StridedShard(dim, split_factor=factor)


def is_strided_shard(placement: Placement) -> bool:
    """Return True for placements that `strided_shard` has created.

    In some torch versions, these placements are also instances of `Shard`.
    """
    return isinstance(placement, _StridedShard)


# -- ShardedTensor -----------------------------------------------------------------------------------------


def make_sharded_tensor(
    local: torch.Tensor,
    pieces: list[tuple[list[int], list[int], int]],
    shape: tuple[int, ...],
    group: Any,
) -> Any:
    """Return a `ShardedTensor` in which `local` is this rank's shard. The shard may be empty.

    `pieces` contains the offsets, the sizes and the rank of every shard. Every rank passes all of them, so the ranks
    need not communicate. FSDP1's sharded state dicts contain `ShardedTensor`s, and `torch.distributed.checkpoint` reads
    them.
    """
    device = local.device
    kind = device.type if device.type == "cpu" else f"{device.type}:{device.index}"
    metadata = [ShardMetadata(offsets, sizes, placement=f"rank:{rank}/{kind}") for offsets, sizes, rank in pieces]
    own = [each for each, (_, _, rank) in zip(metadata, pieces, strict=True) if rank == dist.get_rank()]
    mine = [ShardOfTensor(local, each) for each in own]
    properties = TensorProperties(dtype=local.dtype)
    about = ShardedTensorMetadata(metadata, torch.Size(shape), properties)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # recommends DTensors, which users cannot choose here
        return ShardedTensor._init_from_local_shards_and_global_metadata(mine, about, process_group=group)


def read_sharded_tensor(tensor: Any) -> tuple[tuple[int, ...], torch.dtype, torch.Tensor | None]:
    """Return the shape and the dtype of a `ShardedTensor`, and this rank's shard (None if the rank has none)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        about, shards = tensor.metadata(), tensor.local_shards()
    return tuple(about.size), about.tensor_properties.dtype, shards[0].tensor if shards else None


# -- modules -----------------------------------------------------------------------------------------------

own_parameters: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
"""Return the dict of a module's own parameters. Assigning to this dict is far faster than `setattr`."""
own_buffers: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
"""Return the dict of a module's own buffers."""
own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""Return the dict of a module's children. If a child has two names, `named_children` omits the second one."""
non_persistent_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""Return the names of a module's own buffers that are not in its state dict."""
hooks_of: Callable[[nn.Module], tuple[dict[int, Any], ...]]
hooks_of = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Return the dicts of a module's forward and backward hooks. The keys are the numbers of the hooks' handles."""
hooks_of_tensor: Callable[[torch.Tensor], tuple[Any, Any]]
hooks_of_tensor = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""Return the dict of a tensor's gradient hooks and the dict of its post-accumulate hooks.

Each of them is None if the tensor has no such hooks.
"""


def changes_own_state(module: nn.Module) -> bool:
    """Return True if a module's own state dict entries may differ from the entries that `nn.Module` would save.

    This function ignores hooks of modules with children, because such hooks rename the entries of the children.
    """
    kind, has_children = type(module), bool(module._modules)
    if kind._save_to_state_dict is not nn.Module._save_to_state_dict:
        return True
    return not has_children and (bool(module._state_dict_hooks) or kind.state_dict is not nn.Module.state_dict)


def own_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's own state dict entries. Their names have no prefix.

    The public `state_dict` also returns the entries of children, and it runs hooks that unshard parameters.
    """
    found: dict[str, Any] = {}
    if not module._modules and type(module).state_dict is not nn.Module.state_dict:
        return module.state_dict(destination=found, prefix="", keep_vars=False)
    module._save_to_state_dict(found, "", False)
    for hook in () if module._modules else module._state_dict_hooks.values():
        changed = hook(module, found, "", {})
        if changed is not None and not getattr(hook, "_from_public_api", False):
            found = changed
    return found


def load_own_state(module: nn.Module, values: dict[str, Any]) -> None:
    """Load `values`, which `own_state` has returned, into `module`. Missing and unexpected entries are ignored.

    The load is strict anyway, because some modules look for their values in the list of unexpected keys.
    """
    module._load_from_state_dict(values, "", {}, True, [], [], [])


quick_attributes = torch._C.DisableTorchFunctionSubclass
"""Context manager in which attributes of DTensors are read as quickly as those of plain tensors.

Inside this context, torch does not look for `__torch_function__`.
"""
no_transforms = torch._C._DisableFuncTorch
"""Context manager that suspends transforms such as `torch.func.grad`, `jvp` and `vmap`.

Tensors that are created inside this context are plain tensors.
"""


def hooks_of_all() -> list[dict[int, Any]]:
    """Return the dicts of hooks that apply to all modules or to all optimizers."""
    return [
        all_modules._global_forward_hooks,
        all_modules._global_forward_pre_hooks,
        all_modules._global_backward_hooks,
        all_modules._global_backward_pre_hooks,
        all_optimizers._global_optimizer_pre_hooks,
        all_optimizers._global_optimizer_post_hooks,
    ]


def hooks_made() -> int:
    """Return a counter that grows whenever a hook of a module, a tensor or an optimizer is registered."""
    return RemovableHandle.next_id


def set_rnn_weight(module: nn.Module, name: str, weight: torch.Tensor) -> None:
    """Put `weight` into the list of weights that a recurrent layer computes with, as its `__setattr__` does.

    This is a no-op for other modules.
    """
    names: Any = getattr(module, "_flat_weights_names", ())
    weights: Any = getattr(module, "_flat_weights", [])
    if name in names:
        weights[names.index(name)] = weight


def moves_to_shared_memory(function: Any) -> bool:
    """Return True if `function` is the lambda that `Module.share_memory` passes to `Module._apply`.

    The qualified name is the only way to recognize this lambda.
    """
    return getattr(function, "__qualname__", "").startswith(f"{nn.Module.share_memory.__qualname__}.")


BATCH_NORM: type[nn.Module] = nn.modules.batchnorm._NormBase
"""The base class of all batch and instance norms."""
BATCH_NORM_BASE: type[nn.Module] = nn.modules.batchnorm._BatchNorm
"""The base class of batch norms. By default, FSDP1's mixed precision does not apply to batch norms."""


def is_replicated(module: nn.Module) -> bool:
    """Return True if torch's composable `replicate` was applied to `module`. `fully_shard` skips such modules.

    This function does not import `replicate`. If `replicate` has not been imported, it was not applied to any module.
    """
    contract = sys.modules.get("torch.distributed._composable.contract")
    return contract is not None and "replicate" in (contract._get_registry(module) or ())


def mark_fully_sharded(module: nn.Module) -> None:
    """Make torch's composable `replicate` skip `module` if a program applies `replicate` to a surrounding module.

    Otherwise, `replicate` would replace DTensors by their local tensors. The mark is an attribute whose name torch
    generates when `replicate` is imported. So this function is a no-op if `replicate` has not been imported yet.
    """
    contract = sys.modules.get("torch.distributed._composable.contract")
    if contract is not None:
        module.__dict__.setdefault(contract.REGISTRY_KEY, {})["fully_shard"] = contract.RegistryItem()
