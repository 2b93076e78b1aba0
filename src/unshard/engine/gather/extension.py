"""Tensor subclasses with their own gather protocol: the shard says what is gathered and how it is unsharded.

A shard takes part if it has both methods:

    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (tensors to gather, metadata)
    fsdp_post_all_gather(gathered, metadata, param_dtype, *, out=None) -> (unsharded tensor, tensors to free)

The older form of the first takes only the mesh. From the second all-gather on `out` is the first's result,
to be filled in place. The result may have the padding of uneven shards: its first rows are the parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...comm.agreement import require_agreement
from ...comm.interface import Label, Transport, Work, Works
from ...errors import ProtocolError, UnsupportedError
from ...policies import MixedPrecisionPolicy
from ...torch_private import as_dtensor, contiguous_stride, local_of, preserve_version_counter, storage_key
from ..params.buffers import Buffer, will_empty
from ..params.param import ManagedParam, mark_unsharded

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(shard: torch.Tensor, name: str) -> bool:
    """Whether a parameter's shard brings its own gather protocol."""
    pre, post = hasattr(shard, PRE), hasattr(shard, POST)
    if pre != post:
        have, lack = (PRE, POST) if pre else (POST, PRE)
        raise ProtocolError(f"The shard of parameter {name!r} has {have} but not {lack}; it needs both or neither.")
    return pre


def refuse_opaque(parameter: torch.Tensor, name: str, remedy: str) -> None:
    """Raise for a subclass that has no memory of its own but inner tensors, and no gather protocol."""
    if hasattr(type(parameter), "__tensor_flatten__") and not is_extended(parameter, name):
        raise UnsupportedError(
            f"Parameter {name!r} is a {type(parameter).__name__}, a tensor subclass with inner tensors and without "
            f"{PRE} and {POST}: nothing says how its shards are gathered. {remedy}"
        )


class Extension:
    """One such parameter. What it gathers lies in memory that comes and goes under tensors that stay the same."""

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
        """What to gather: flat outputs and inputs."""
        shard = local_of(self.param.sharded)
        pre = getattr(shard, PRE)
        if shard.device != self._device:
            # The methods may be patched onto the tensor itself; what `.to` returns has lost them.
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
        """Make the unsharded parameter of what was gathered."""
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
            out = self._unsharded  # the parameter is the first rows of it
        with preserve_version_counter(out):
            post(self._gathered, self._metadata, self._dtype, out=out)

    def _without_padding(self, unsharded: torch.Tensor) -> torch.Tensor:
        """The parameter's rows of what the second method returned, which may have the padding of uneven shards."""
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
        """Memory of the unsharded tensor that is not the all-gather's own output."""
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
    """All such parameters of a part, gathered together with the rest where the transport can group."""

    def __init__(self, members: list[Extension], transport: Transport):
        self._members, self._transport = members, transport
        self._kept: list[Any] = []

    def enter(self) -> None:
        """Let the params refer to these parameters; those not made yet follow when they are."""
        for member in self._members:
            member.param.unsharded = member.parameter

    def parameters(self) -> list[tuple[ManagedParam, nn.Parameter]]:
        return [(member.param, member.parameter) for member in self._members if member.parameter is not None]

    def start(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None) -> Work:
        """Issue the gather of `outputs` from `inputs` and of these parameters."""
        mine_out: list[torch.Tensor] = []
        mine_in: list[torch.Tensor] = []
        with torch.no_grad():
            for member in self._members:
                out, into = member.prepare()
                mine_out += out
                mine_in += into
            if self._transport.traits.gathers_groups:
                self._place_own(mine_out, mine_in)
                return self._transport.all_gather(outputs + mine_out, inputs + mine_in, label=label)
            works = [self._transport.all_gather(outputs, inputs, label=label)] if outputs else []
            return Works([*works, self._gather_bytes(mine_out, mine_in, None if outputs else label)])

    def _place_own(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """A transport that sends nothing reads this rank's piece from its place in the output."""
        if self._transport.traits.in_place_only:
            for output, piece in zip(outputs, inputs, strict=True):
                output.view(self._transport.world, -1)[self._transport.rank].copy_(piece)
        self._kept = inputs

    def _gather_bytes(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None) -> Work:
        """One collective of bytes, copied out when it is waited for."""
        rows = [each.view(torch.uint8) for each in inputs]
        piece = torch.cat(rows)
        gathered = piece.new_empty(piece.numel() * self._transport.world)
        work = self._transport.all_gather([gathered], [piece], label=label)
        return _Unpack(work, gathered.view(self._transport.world, -1), piece, outputs)

    def finish(self) -> None:
        self._kept = []
        with torch.no_grad():
            for member in self._members:
                member.finish()

    def release(self) -> None:
        self._kept = []
        for member in self._members:
            member.release()


class _Unpack:
    """A gather of bytes whose columns are copied to where they belong."""

    def __init__(self, work: Work, gathered: torch.Tensor, piece: torch.Tensor, outputs: list[torch.Tensor]):
        self._work, self._unsharded, self._piece, self._outputs = work, gathered, piece, outputs

    def wait(self) -> None:
        self._work.wait()
        world = self._unsharded.shape[0]
        tables = [output.view(torch.uint8).view(world, -1) for output in self._outputs]
        torch.split_with_sizes_copy(self._unsharded, [table.shape[1] for table in tables], dim=1, out=tables)
