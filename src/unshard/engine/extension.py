"""Parameters with their own gather protocol.

A gather protocol consists of two methods of a tensor subclass. They define which tensors are gathered, and how the
parameter is unsharded from the gathered tensors. A parameter uses the protocol if its shard has both methods:

    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (tensors to gather, metadata)
    fsdp_post_all_gather(gathered, metadata, param_dtype, *, out=None) -> (unsharded tensor, tensors to free)

`fsdp_pre_all_gather` may also have `mesh` as its only argument, as in older versions of the protocol. The first call of
`fsdp_post_all_gather` returns the unsharded tensor. Later calls receive this tensor as `out` and fill it in place. If
the shards are uneven, the unsharded tensor may have extra rows at the end as padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.agreement import require_agreement
from ..comm.interface import Label, Transport, Work, Works, WorkThen
from ..errors import ProtocolError, UnsupportedError
from ..policies import MixedPrecisionPolicy
from ..torch_private import as_dtensor, contiguous_stride, local_of, preserve_version_counter, storage_key
from .params.buffers import Buffer, will_empty
from .params.param import ManagedParam, mark_unsharded

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(shard: torch.Tensor, name: str) -> bool:
    """Return True if `shard`, the shard of the parameter `name`, has its own gather protocol."""
    pre, post = hasattr(shard, PRE), hasattr(shard, POST)
    if pre != post:
        have, lack = (PRE, POST) if pre else (POST, PRE)
        raise ProtocolError(f"The shard of parameter {name!r} has {have} but not {lack}; it needs both or neither.")
    return pre


def refuse_opaque(parameter: torch.Tensor, name: str, remedy: str) -> None:
    """Raise an error if `parameter` is a tensor subclass that has inner tensors but no gather protocol."""
    if hasattr(type(parameter), "__tensor_flatten__") and not is_extended(parameter, name):
        raise UnsupportedError(
            f"Parameter {name!r} is a {type(parameter).__name__}, a tensor subclass with inner tensors and without "
            f"{PRE} and {POST}: nothing says how its shards are gathered. {remedy}"
        )


class Extension:
    """A parameter with its own gather protocol. Its all-gather outputs are created once and then refilled."""

    def __init__(
        self,
        param: ManagedParam,
        transport: Transport,
        mesh: DeviceMesh | None,
        policy: MixedPrecisionPolicy,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.param, self._transport, self._mesh, self._policy = param, transport, mesh, policy
        self._dtype, self._device = dtype, device
        self._unsharded: torch.Tensor | None = None
        self.parameter: nn.Parameter | None = None
        self._metadata: Any = None
        self._buffers: list[Buffer] = []
        self._gathered: tuple[torch.Tensor, ...] = ()
        self._inner: list[tuple[torch.UntypedStorage, int]] = []

    def prepare(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Call `fsdp_pre_all_gather` and return the outputs and inputs of the all-gather as flat tensors."""
        shard = local_of(self.param.sharded)
        pre = getattr(shard, PRE)
        if shard.device != self._device:
            # The methods may be patched onto the tensor object, and `.to` returns another object.
            moved = shard.to(self._device, non_blocking=True)
            pre = getattr(moved, PRE, None) or pre.__func__.__get__(moved)
        arguments = self._arguments(pre)
        tensors, self._metadata = pre(*arguments)
        inputs = [tensor.contiguous() for tensor in tensors]
        if not self._gathered:
            self._make_outputs(inputs)
        for buffer in self._buffers:
            buffer.take()
        return [each.view(-1) for each in self._gathered], [each.view(-1) for each in inputs]

    def _arguments(self, pre: Any) -> tuple[Any, ...]:
        count = len(inspect.signature(pre).parameters)
        shape = torch.Size(self.param.sharding.shape)
        every = (self._mesh, shape, contiguous_stride(shape), self.param.locations[0].module(), self._policy)
        if count not in (1, len(every)):
            raise ProtocolError(
                f"{PRE} of parameter {self.param.name!r} takes {count} arguments; it must take 1 (mesh) or 5 (mesh, "
                "outer_size, outer_stride, module, mp_policy)."
            )
        return every[:count]

    def _make_outputs(self, inputs: Sequence[torch.Tensor]) -> None:
        facts = [f"a tensor of shape {tuple(each.shape)}, {each.dtype}" for each in inputs]
        what = (
            f"what {PRE} returns for parameter {self.param.name!r} (shards of uneven parameters have to be padded to "
            "the size of rank 0's)"
        )
        require_agreement(self._transport, self._device, what, facts)
        world, gathered = self._transport.world, []
        for each in inputs:
            buffer = Buffer(each.numel() * each.element_size() * world, self._device)
            shape = (each.shape[0] * world, *each.shape[1:]) if each.ndim else (world,)
            gathered.append(buffer.tensor(each.dtype, 0, shape))
            self._buffers.append(buffer)
        self._gathered = tuple(gathered)

    def finish(self) -> None:
        """Fill the unsharded parameter from the gathered tensors. The first call creates the parameter."""
        post = getattr(local_of(self.param.sharded), POST)
        if self._unsharded is None:
            padded, inner = post(self._gathered, self._metadata, self._dtype)
            unsharded = as_dtensor(self._without_padding(padded), self.param.tp_spec)
            self._unsharded = padded
            self.parameter = self.param.unsharded = nn.Parameter(
                unsharded, requires_grad=self.param.sharded.requires_grad
            )
            mark_unsharded(self.parameter, self.param.name)
            self._own(inner)
            return
        for storage, nbytes in self._inner:
            storage.resize_(nbytes)
        assert self.parameter is not None
        out: torch.Tensor = self.parameter if self.param.tp_spec is None else local_of(self.parameter)
        if out.shape != self._unsharded.shape:
            out = self._unsharded  # with padding; the parameter is a view of its first rows
        with preserve_version_counter(out):  # else autograd would refuse graphs that saved the parameter
            post(self._gathered, self._metadata, self._dtype, out=out)

    def _without_padding(self, unsharded: torch.Tensor) -> torch.Tensor:
        shape = torch.Size(self.param.sharding.shape)
        if unsharded.shape == shape:
            return unsharded
        if unsharded.shape[1:] != shape[1:] or unsharded.shape[:1] < shape[:1]:
            raise ProtocolError(
                f"{POST} of parameter {self.param.name!r} on rank {self._transport.rank} returned a tensor of shape "
                f"{tuple(unsharded.shape)}; expected {tuple(shape)}, the shape of the unsharded parameter, or "
                "more rows (padding)."
            )
        return unsharded[: shape[0]]

    def _own(self, inner: Sequence[torch.Tensor]) -> None:
        """Make `release` free the memory of `inner`, and `finish` allocate it again. All-gather outputs are skipped."""
        outputs = {storage_key(buffer.storage) for buffer in self._buffers}
        storages = {storage_key(each.untyped_storage()): each.untyped_storage() for each in inner}
        self._inner = [(each, each.nbytes()) for key, each in storages.items() if key not in outputs]
        will_empty(self, [storage for storage, _ in self._inner])

    def release(self) -> None:
        for storage, _ in self._inner:
            storage.resize_(0)
        for buffer in self._buffers:
            buffer.release()


class Extensions:
    """The parameters of one param group that have gather protocols.

    If the transport allows it, one collective gathers these parameters together with the rest of the param group.
    """

    def __init__(self, members: list[Extension], transport: Transport):
        self._members, self._transport = members, transport
        self._kept: list[torch.Tensor] = []
        """Inputs of the all-gather in flight. Often, nothing else refers to these tensors."""

    def enter(self) -> None:
        """Set `ManagedParam.unsharded` of each parameter. It is None until the first call of `finish`."""
        for member in self._members:
            member.param.unsharded = member.parameter

    def parameters(self) -> list[tuple[ManagedParam, nn.Parameter]]:
        return [(member.param, member.parameter) for member in self._members if member.parameter is not None]

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, label: Label | None) -> Work:
        """Issue an all-gather like `Transport.all_gather`, and also gather the parameters with gather protocols."""
        own_outputs: list[torch.Tensor] = []
        own_inputs: list[torch.Tensor] = []
        transport = self._transport
        with torch.no_grad():
            for member in self._members:
                out, into = member.prepare()
                own_outputs += out
                own_inputs += into
            if transport.traits.gathers_groups:
                if transport.traits.in_place_only:
                    for output, piece in zip(own_outputs, own_inputs, strict=True):
                        output.view(transport.world, -1)[transport.rank].copy_(piece)
                self._kept = own_inputs
                return transport.all_gather(outputs + own_outputs, inputs + own_inputs, label=label)
            works = [transport.all_gather(outputs, inputs, label=label)] if outputs else []
            # Gather these parameters as one tensor of bytes. Waiting for the work copies the bytes out.
            piece = torch.cat([each.view(torch.uint8) for each in own_inputs])
            gathered = piece.new_empty(piece.numel() * transport.world)
            self._kept = [piece]

            def unpack() -> None:
                tables = [output.view(torch.uint8).view(transport.world, -1) for output in own_outputs]
                widths = [table.shape[1] for table in tables]
                torch.split_with_sizes_copy(gathered.view(transport.world, -1), widths, dim=1, out=tables)

            work = transport.all_gather([gathered], [piece], label=None if outputs else label)
            return Works([*works, WorkThen(work, unpack)])

    def finish(self) -> None:
        self._kept = []
        with torch.no_grad():
            for member in self._members:
                member.finish()

    def release(self) -> None:
        self._kept = []
        for member in self._members:
            member.release()
