"""Parameters whose own shard says what is gathered and how it becomes whole: tensor subclasses with a gather protocol.

A shard takes part if it has both methods:

    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (tensors to gather, metadata)
    fsdp_post_all_gather(gathered, metadata, param_dtype, *, out=None) -> (whole tensor, tensors whose memory to free)

The older form of the first takes only the mesh. From the second gather on `out` is the whole tensor of the first one,
to be filled in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.agreement import require_agreement
from ..comm.interface import Transport, Work, Works
from ..errors import ProtocolError
from ..policies import MixedPrecisionPolicy
from ..torch_private import contiguous_stride, keep_version, local_of, storage_key, wrap_like
from .buffers import Buffer
from .faces import Slot, mark_full

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(shard: torch.Tensor, name: str) -> bool:
    """Whether a parameter's shard brings its own gather protocol."""
    pre, post = hasattr(shard, PRE), hasattr(shard, POST)
    if pre != post:
        have, lack = (PRE, POST) if pre else (POST, PRE)
        raise ProtocolError(f"The shard of parameter {name!r} has {have} but not {lack}; it needs both or neither.")
    return pre


class Extension:
    """One such parameter. What it gathers lies in memory that comes and goes under tensors that stay the same."""

    def __init__(
        self,
        slot: Slot,
        transport: Transport,
        mesh: DeviceMesh | None,
        policy: MixedPrecisionPolicy,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.slot, self._transport, self._mesh, self._policy = slot, transport, mesh, policy
        self._dtype, self._device = dtype, device
        self._whole: torch.Tensor | None = None
        self.face: nn.Parameter | None = None
        self._metadata: Any = None
        self._buffers: list[Buffer] = []
        self._gathered: tuple[torch.Tensor, ...] = ()
        self._inner: list[tuple[torch.UntypedStorage, int]] = []

    def prepare(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What to gather: flat outputs and inputs."""
        shard = local_of(self.slot.sharded)
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
        shape = torch.Size(self.slot.cut.shape)
        every = (self._mesh, shape, contiguous_stride(shape), self.slot.homes[0].module(), self._policy)
        if count not in (1, len(every)):
            raise ProtocolError(
                f"{PRE} of parameter {self.slot.name!r} takes {count} arguments; it must take 1 (mesh) or 5 (mesh, "
                "outer_size, outer_stride, module, mp_policy)."
            )
        return every[:count]

    def _make_outputs(self, inputs: Sequence[torch.Tensor]) -> None:
        facts = [f"a tensor of shape {tuple(each.shape)}, {each.dtype}" for each in inputs]
        what = (
            f"what {PRE} returns for parameter {self.slot.name!r} (shards of uneven parameters have to be padded to "
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
        """Make the parameter whole out of what was gathered."""
        post = getattr(local_of(self.slot.sharded), POST)
        if self._whole is None:
            self._whole, inner = post(self._gathered, self._metadata, self._dtype)
            face = wrap_like(self._whole, self.slot.whole_spec)
            self.face = self.slot.full = nn.Parameter(face, requires_grad=self.slot.sharded.requires_grad)
            mark_full(self.face, self.slot.name)
            self._own(inner)
            return
        for storage, nbytes in self._inner:
            storage.resize_(nbytes)
        assert self.face is not None
        out = self.face if self.slot.whole_spec is None else local_of(self.face)
        with keep_version(out):
            post(self._gathered, self._metadata, self._dtype, out=out)

    def _own(self, inner: Sequence[torch.Tensor]) -> None:
        """Memory of the whole tensor that is not the gather's own output."""
        outputs = {storage_key(buffer.storage) for buffer in self._buffers}
        storages = {storage_key(each.untyped_storage()): each.untyped_storage() for each in inner}
        self._inner = [(each, each.nbytes()) for key, each in storages.items() if key not in outputs]

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
        """Let the slots show these faces; those not made yet follow when they are."""
        for member in self._members:
            member.slot.full = member.face

    def faces(self) -> list[tuple[Slot, nn.Parameter]]:
        return [(member.slot, member.face) for member in self._members if member.face is not None]

    def start(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        """Issue the gather of `outputs` from `inputs` and of these parameters."""
        mine_out: list[torch.Tensor] = []
        mine_in: list[torch.Tensor] = []
        with torch.no_grad():
            for member in self._members:
                out, into = member.prepare()
                mine_out += out
                mine_in += into
            if self._transport.gathers_groups:
                self._place_own(mine_out, mine_in)
                return self._transport.gather(outputs + mine_out, inputs + mine_in)
            works = [self._transport.gather(outputs, inputs)] if outputs else []
            return Works([*works, self._gather_bytes(mine_out, mine_in)])

    def _place_own(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """A transport that sends nothing reads this rank's piece from its place in the output."""
        if self._transport.in_place_only:
            for output, piece in zip(outputs, inputs, strict=True):
                output.view(self._transport.world, -1)[self._transport.rank].copy_(piece)
        self._kept = inputs

    def _gather_bytes(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        """One collective of bytes, copied out when it is waited for."""
        rows = [each.view(torch.uint8) for each in inputs]
        piece = torch.cat(rows)
        whole = piece.new_empty(piece.numel() * self._transport.world)
        work = self._transport.gather([whole], [piece])
        return _Unpack(work, whole.view(self._transport.world, -1), piece, outputs)

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

    def __init__(self, work: Work, whole: torch.Tensor, piece: torch.Tensor, outputs: list[torch.Tensor]):
        self._work, self._whole, self._piece, self._outputs = work, whole, piece, outputs

    def wait(self) -> None:
        self._work.wait()
        world = self._whole.shape[0]
        tables = [output.view(torch.uint8).view(world, -1) for output in self._outputs]
        torch.split_with_sizes_copy(self._whole, [table.shape[1] for table in tables], dim=1, out=tables)
