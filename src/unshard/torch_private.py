"""Every private torch API this library needs, in one place, with the reason and the versions that need it.

Checked with torch 2.11 (CUDA) and 2.13 (CPU).
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
from torch._C._distributed_c10d import AllreduceOptions as AllreduceOptions
from torch._C._distributed_c10d import ReduceScatterOptions as ReduceScatterOptions
from torch.amp.grad_scaler import OptState
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as ShardOfTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor as ShardedTensor
from torch.distributed._shard.sharded_tensor import ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

_Function = TypeVar("_Function", bound=Callable[..., Any])

# One call for many tensors; what `torch.optim` itself is built on. Documented, but with underscores. All versions.
foreach_copy = torch._foreach_copy_
foreach_add = torch._foreach_add_
foreach_div = torch._foreach_div_
foreach_zero = torch._foreach_zero_
foreach_mul = torch._foreach_mul_
foreach_norm = torch._foreach_norm
unscale_and_check = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiplies tensors of one dtype, and sets a flag if any element is not finite; what torch's scaler uses."""


def make_dtensor(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """A DTensor over exactly `local`, with a contiguous global shape.

    The public `DTensor.from_local` puts a view of `local` inside, so the caller could not tell later whether
    the DTensor still holds the tensor it was given. All versions.
    """
    meta = TensorMeta(shape, contiguous_stride(shape), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    dtensor = DTensor(_without_offset(local), spec, requires_grad=False)
    rebind_local(dtensor, local)
    return dtensor


def make_sharded_parameter(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, requires_grad: bool
) -> nn.Parameter:
    """The same as a parameter, for whose making torch makes the DTensor once more. All versions."""
    parameter = nn.Parameter(make_dtensor(_without_offset(local), mesh, placements, shape), requires_grad)
    rebind_local(parameter, local)
    return parameter


def _without_offset(local: torch.Tensor) -> torch.Tensor:
    """A tensor to make a DTensor with in place of `local`.

    A DTensor keeps the storage offset of the tensor it was made with, though it has no storage, and with one it can be
    neither copied nor saved.
    """
    if type(local) is not torch.Tensor or local.storage_offset() == 0:
        return local
    return local.new_empty(()).expand(local.shape)


def wrap_like(local: torch.Tensor, spec: DTensorSpec | None) -> torch.Tensor:
    """A DTensor over exactly `local` with the given spec; `local` itself without one. As above. All versions."""
    return local if spec is None else DTensor(local, spec, requires_grad=False)


def strided_shard(dim: int, factor: int) -> Placement:
    """A cut of a dimension that a later mesh dimension has cut in `factor` pieces first. All versions."""
    return _StridedShard(dim, split_factor=factor)


# The same object again while anybody holds it: comparing as many equal meshes as there are parameters takes
# milliseconds in every step. The key holds the meshes and they their roots, so no id is given to another one meanwhile.
_concatenated: weakref.WeakValueDictionary[Any, DeviceMesh] = weakref.WeakValueDictionary()


def concatenated_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """The mesh that has the dimensions of all of these, which are slices of one; no public way. All versions."""
    if len(meshes) == 1:
        return meshes[0]
    key = tuple((id(root_mesh(mesh)), mesh) for mesh in meshes)
    mesh = _concatenated.get(key)
    if mesh is None:
        mesh = _concatenated[key] = DeviceMesh._concatenate(meshes)
    return mesh


def flattened_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The mesh as one dimension of that name; torch's own users call this, too. All versions."""
    return mesh._flatten(name)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one was sliced from, or itself. All versions."""
    return mesh._get_root_mesh()


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


# Called for every parameter in every step, hence no Python functions.
local_of: Callable[[torch.Tensor], torch.Tensor] = attrgetter("_local_tensor")
"""The local tensor object itself; `to_local()` makes a new view under autograd. All versions."""
spec_of: Callable[[torch.Tensor], DTensorSpec] = attrgetter("_spec")
"""Mesh and placements in one attribute; the public properties look it up twice. All versions."""
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Autograd's count of writes to a tensor. All versions."""


def rebind_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Put `local` inside a DTensor, keeping the object; there is no public way. All versions."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """The dict a module registers its own parameters in: an assignment there is far cheaper than `setattr`."""
    return module._parameters


def make_sharded_tensor(
    local: torch.Tensor,
    pieces: list[tuple[list[int], list[int], int]],
    shape: tuple[int, ...],
    group: Any,
) -> Any:
    """A `ShardedTensor` of which this rank has `local`, maybe nothing; `pieces`: offsets, sizes and ranks of all.

    What sharded state dicts of FSDP1 hold, and `torch.distributed.checkpoint` reads; it has no public name. Made
    from what all ranks know, without asking them. All versions.
    """
    device = local.device
    kind = device.type if device.type == "cpu" else f"{device.type}:{device.index}"
    metadata = [ShardMetadata(offsets, sizes, placement=f"rank:{rank}/{kind}") for offsets, sizes, rank in pieces]
    own = [each for each, (_, _, rank) in zip(metadata, pieces, strict=True) if rank == dist.get_rank()]
    mine = [ShardOfTensor(local, each) for each in own]
    properties = TensorProperties(dtype=local.dtype)
    about = ShardedTensorMetadata(metadata, torch.Size(shape), properties)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that torch would rather have DTensors helps no user of these
        return ShardedTensor._init_from_local_shards_and_global_metadata(mine, about, process_group=group)


def read_sharded_tensor(tensor: Any) -> tuple[tuple[int, ...], torch.dtype, torch.Tensor | None]:
    """Shape, dtype and this rank's part of a `ShardedTensor`. All versions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        about, shards = tensor.metadata(), tensor.local_shards()
    return tuple(about.size), about.tensor_properties.dtype, shards[0].tensor if shards else None


def put_in_weights(module: nn.Module, name: str, weight: torch.Tensor) -> None:
    """Into the list that a recurrent layer computes with, which its `__setattr__` keeps. All versions."""
    names: Any = getattr(module, "_flat_weights_names", ())
    weights: Any = getattr(module, "_flat_weights", [])
    if name in names:
        weights[names.index(name)] = weight


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """The dict a module registers its own buffers in, likewise."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dict a module registers its children in; `named_children` leaves out second names of a child."""
    return module._modules


BATCH_NORM: type[nn.Module] = nn.modules.batchnorm._NormBase
"""What all batch and instance norms derive from. All versions."""
BATCH_NORM_BASE: type[nn.Module] = nn.modules.batchnorm._BatchNorm
"""What batch norms derive from; the class that FSDP1 names in its defaults. All versions."""


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's composable `replicate` was applied to this very module, which then keeps its parameters whole.

    Looked up, not imported: where nobody imported it, nobody applied it. All versions.
    """
    contract = sys.modules.get("torch.distributed._composable.contract")
    return contract is not None and "replicate" in (contract._get_registry(module) or ())


post_accumulate_hooks: Callable[[torch.Tensor], dict[int, Callable[[torch.Tensor], None]] | None]
post_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")
"""What users registered with `register_post_accumulate_grad_hook`, which autograd calls itself. All versions."""


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many tensors (and Python objects) share a storage; there is no public way. All versions."""
    return torch._C._storage_Use_Count(storage._cdata)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Tells storages apart even when they are empty; Python objects of one storage come and go. All versions."""
    return storage._cdata


def keep_version(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Writes in here do not look to autograd like a change of `tensor`: its saved values come back. All versions."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward the calling thread is running inside, or -1. All versions."""


def inside_backward() -> bool:
    return current_backward() != -1


def on_backward_end(callback: Callable[[], None]) -> None:
    """Run `callback` when the running backward is over; only valid inside one. All versions."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def watch_gradient(tensor: torch.Tensor, hook: Callable[[Any], None]) -> None:
    """Call `hook` when a gradient reaches `tensor`, which was just made and has no hooks yet; for good.

    What `register_hook` does without a handle to remove the hook with, which costs three times as much as the rest: two
    of these are set per unit and step. All versions.
    """
    node = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None:
        tensor.register_hook(hook)
        return
    hooks: OrderedDict[int, Any] = OrderedDict()  # a user's own `register_hook` adds to it
    hooks[0] = hook
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)


def outside_transforms() -> AbstractContextManager[Any]:
    """Tensors made in here are plain ones even inside `torch.func.grad`, `vmap` and the like. All versions."""
    return torch._C._DisableFuncTorch()


_frames_compiled_by: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""What compiles the Python frames of the calling thread; None outside of compiled functions. All versions."""


def never_compiled(function: _Function) -> _Function:
    """Keep `torch.compile` from tracing `function`: it breaks the graph and runs as it is.

    `torch.compiler.disable` would import the compiler, seconds for every program; this waits until somebody else has,
    which every optimizer does. So it also asks whether anything is being compiled here and now. All versions.
    """
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if "torch._dynamo" in sys.modules and (torch.compiler.is_compiling() or _frames_compiled_by() is not None):
            return disabled(*args)
        return function(*args)

    return call  # type: ignore[return-value]


def chunk_cat_into(out: torch.Tensor, tensors: list[torch.Tensor], chunks: int) -> None:
    """Cut each tensor along dim 0 into `chunks` pieces, pad them with zeros, lay them side by side in `out`.

    `out` is (chunks, sum of piece sizes). One kernel on CUDA, where it casts only bf16 to fp32; other casts go
    through a buffer in the gradients' dtype. No public operation pads and interleaves in one call. All versions.
    """
    dtype = tensors[0].dtype
    if dtype == out.dtype or (dtype == torch.bfloat16 and out.dtype == torch.float32):
        torch._chunk_cat(tensors, dim=0, num_chunks=chunks, out=out)
    else:
        out.copy_(torch._chunk_cat(tensors, dim=0, num_chunks=chunks))


def gather_one(group: Any, output: torch.Tensor, input: torch.Tensor, options: AllgatherOptions) -> Any:
    """The group's own all-gather of one tensor; renamed `all_gather_single` in 2.13, which keeps this name."""
    return group._allgather_base(output, input, options)


def reduce_scatter_one(group: Any, output: torch.Tensor, input: torch.Tensor, options: ReduceScatterOptions) -> Any:
    """The group's own reduce-scatter of one tensor; renamed in 2.13, which keeps this name."""
    return group._reduce_scatter_base(output, input, options)


def reduce_scatter_into(output: torch.Tensor, input: torch.Tensor, group: Any) -> None:
    """The function of `torch.distributed`, which 2.13 renames, and warns where the older name is used."""
    function: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(output, input, group=group)


def backend_allocator(group: Any, device: torch.device) -> Any:
    """What the backend allocates its own memory with, or None. All versions."""
    if device.type != "cuda":
        return None
    backend = group._get_backend(device)
    return backend.mem_allocator if backend.supports_tensor_alloc(device) else None


def symmetric_memory_pool(device: torch.device, backend: str) -> Any:
    """Torch's pool of symmetric memory; the module has no public name yet. All versions."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory.set_backend(backend)  # type: ignore[arg-type]
    return _symmetric_memory.get_mem_pool(device)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `tensor` is a view of, to autograd. All versions."""
    return tensor._base


profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler records right now. All versions."""


def backend_name(group: Any, device: torch.device) -> str:
    """Name of the backend that serves `device` in `group`; for a group written in Python, its own name.

    `dist.get_backend` answers for the group's default device only. All versions.
    """
    try:
        return group._get_backend(device).name().lower()
    except (RuntimeError, AttributeError):
        return group.name().lower()


def served_device_types(group: Any) -> list[str]:
    """The types of device whose tensors `group` can send; there is no public way. All versions."""
    return [device.type for device in group._device_types]


def job_store() -> dist.Store:
    """The store through which the ranks of the job found each other, over a connection of its own. All versions.

    There is no public way to it, and a connection that others use too would make them wait for us.
    """
    return dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]


def group_timeout(group: Any, device: torch.device) -> timedelta:
    """How long a collective of `group` may take before its backend fails it; there is no public way. All versions."""
    return group._get_backend(device).options._timeout


class OpenGradScaler(torch.amp.GradScaler):
    """Torch's scaler, with the parts that have no public names opened to a subclass. All versions."""

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inverse: torch.Tensor
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply the gradients by `inverse`; what is found for each device: 1 if any is not finite, else 0."""
        raise NotImplementedError

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return self.unscale_gradients(optimizer, inv_scale)

    def _check_scale_growth_tracker(self, funcname: str) -> Any:
        """A rank that has no loss never calls `scale`, and still must unscale, step and update with the others."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def scale_on(self, device: torch.device) -> torch.Tensor:
        """The scale on a device; made at the first use."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        assert self._scale is not None
        return self._scale.to(device, non_blocking=device.type != "cpu")

    def stage_of(self, optimizer: torch.optim.Optimizer) -> OptState:
        return self._per_optimizer_states[id(optimizer)]["stage"]

    def set_stage(self, optimizer: torch.optim.Optimizer, stage: OptState) -> None:
        self._per_optimizer_states[id(optimizer)]["stage"] = stage

    def found_any(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last check found a gradient that is not finite; waits for the device."""
        return any(found.item() for found in self._found_inf_per_device(optimizer).values())

    @property
    def device_type(self) -> str:
        return self._device

    @property
    def scale_device(self) -> torch.device | None:
        return None if self._scale is None else self._scale.device

    @staticmethod
    def leaves_scale_to(optimizer: torch.optim.Optimizer) -> bool:
        """Whether torch lets the optimizer's own kernels skip a step (fused ones), and nobody else has a say in it."""
        if not getattr(optimizer, "_step_supports_amp_scaling", False) or hasattr(optimizer, "grad_scale"):
            return False
        return "grad_scaler" not in inspect.signature(optimizer.step).parameters


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a learning rate scheduler has put its wrapper around the step of this object. All versions."""
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


def schedule_again(optimizer: torch.optim.Optimizer) -> None:
    """Put such a wrapper around the step of the class that the object has now: the old one knows the old step.

    The scheduler looks at the mark that a step leaves, to tell whether it was called too early. All versions.
    """
    del vars(optimizer)["step"]
    reference, step = weakref.ref(optimizer), type(optimizer).step

    @functools.wraps(step)
    def marking(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        alive._opt_called = True  # type: ignore[union-attr]
        return step(alive, *args, **kwargs)  # type: ignore[arg-type]

    marking._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marking  # type: ignore[method-assign]
