"""Gathers full tensors on rank 0, and broadcasts full tensors from rank 0, one at a time.

Besides its results, a rank needs memory for the largest tensor only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from ..comm.groups import current_device, staging_device
from ..comm.order.waiting import wait_for
from ..state.boxes import full_box
from ..state.model import HeldTensor
from .files import copy_pieces
from .plan import Described, TensorEntry, make_plan
from .ranks import exchanging, rank_and_size
from .values import DTYPES

_WHAT = "Sending a tensor between the ranks"


def sending_device_type(tensors: Sequence[torch.Tensor]) -> str:
    """Device type used for sends. All ranks use rank 0's."""
    _, size = rank_and_size()
    return staging_device(dist.group.WORLD, tensors).type if size > 1 else "cpu"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as bytes: backends do not support all dtypes."""
    return tensor.reshape(-1).view(torch.uint8)


# -- gathering ----------------------------------------------------------------------------------------------


class Gathering:
    """Gathers tensors. `ranks`: what each rank holds; `held`: what this rank holds."""

    def __init__(self, ranks: list[dict[str, Described]], held: list[HeldTensor], device_type: str):
        self._plan, self._device = make_plan(ranks, spread=False), current_device(device_type)
        self._held = {each.name: each for each in held}
        self._rank, _ = rank_and_size()

    @torch.no_grad()
    def tensors(self, rank0_only: bool, cpu_offload: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and full tensors, on rank 0 or on all ranks. All ranks must exhaust the iterator.

        Without `cpu_offload`, a tensor is on the same device as its local tensor on this rank.
        """
        for name, entry in self._plan.tensors.items():
            held = self._held.get(name)
            device = torch.device("cpu") if cpu_offload else self._device if held is None else held.local.device
            full = None
            if self._rank == 0:
                full = self._receive(entry, held, device)
            elif held is not None:
                self._send(entry, held)
            if not rank0_only:
                full = broadcast(full, entry, self._device.type).to(device)
            if full is not None:
                yield name, full

    def _receive(self, entry: TensorEntry, held: HeldTensor | None, device: torch.device) -> torch.Tensor:
        full = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device)
        own = {} if held is None else dict(zip(held.part.boxes, held.views(), strict=True))
        received, receives = [], []
        for stored in entry.boxes:
            target = full[stored.box.slices_in(full_box(entry.shape))]
            if stored.file == 0:
                copy_pieces(target, own[stored.box])
                continue
            direct = target.is_contiguous() and device == self._device
            buffer = target if direct else torch.empty(stored.box.size, dtype=full.dtype, device=self._device)
            receives.append(dist.P2POp(dist.irecv, _bytes(buffer), stored.file))
            if not direct:
                received.append((target, buffer))
        _exchange(receives)
        for target, buffer in received:
            copy_pieces(target, buffer)
        return full

    def _send(self, entry: TensorEntry, held: HeldTensor) -> None:
        views = dict(zip(held.part.boxes, held.views(), strict=True))
        mine = [views[stored.box] for stored in entry.boxes if stored.file == self._rank]
        buffers = [view.to(self._device, held.dtype).resolve_conj().resolve_neg().contiguous() for view in mine]
        _exchange([dist.P2POp(dist.isend, _bytes(each), 0) for each in buffers])


def _exchange(operations: list[dist.P2POp]) -> None:
    # A batch uses the communicator of the group. Single sends make NCCL create one for every pair of ranks.
    with exchanging(_WHAT):
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


# -- broadcasting -------------------------------------------------------------------------------------------


@torch.no_grad()
def broadcast(tensor: torch.Tensor | None, entry: TensorEntry, device_type: str) -> torch.Tensor:
    """Return rank 0's tensor on all ranks; on rank 0 possibly the tensor itself."""
    rank, size = rank_and_size()
    if size == 1:
        assert tensor is not None
        return tensor
    device = current_device(device_type)
    if tensor is None or rank:
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device)
    else:
        tensor = tensor.to(device).resolve_conj().resolve_neg().contiguous()
    if tensor.numel():
        with exchanging(_WHAT):
            wait_for(dist.broadcast(_bytes(tensor), 0, async_op=True))
    return tensor


@torch.no_grad()
def fill(held: HeldTensor | None, full: torch.Tensor) -> None:
    """Copy this rank's boxes of `full`. Callers keep no reference to it, so it is freed before the next broadcast."""
    if held is None:
        return
    for box, view in zip(held.part.boxes, held.views(), strict=True):
        if box.numel:
            copy_pieces(view, full[box.slices_in(full_box(held.part.shape))])
