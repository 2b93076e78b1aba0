"""Which parameters of an optimizer belong to flat units, under which original names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..comm.process_group import transport_for
from ..engine.faces import Slot
from ..engine.flat_sharded import FlatSharded
from .flatten import flat_sharded_of
from .sharded_tensors import whole_of
from .wrapper_names import clean_tensor_name
from .wrapper_state import WrapperState, wrapper_states


@dataclass(frozen=True)
class Owned:
    """A unit, and the original names of its parameters in their order."""

    state: WrapperState
    sharded: FlatSharded
    names: tuple[str, ...]

    @property
    def group(self) -> Any:
        """Whose ranks hold the pieces; one that nothing is cut over has them whole."""
        return self.state.call.groups.own if self.state.call.groups.meaning.cuts else None

    @property
    def share(self) -> int:
        return self.sharded.flat.local.numel()

    def parameters(self) -> list[tuple[nn.Parameter, list[int]]]:
        """What an optimizer holds of it, each with the numbers of the original ones that it stands for."""
        if self.sharded.originals:
            return [(slot.sharded, [number]) for number, slot in enumerate(self.sharded.slots)]
        return [(self.sharded.flat.sharded, list(range(len(self.sharded.slots))))]

    # -- a state of every parameter as one tensor, cut as the unit is --------------------------------------

    def piece(self, states: dict[int, torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """This rank's piece of a state, from what each parameter (or the flat one) has here; zero elsewhere."""
        if not self.sharded.originals:
            return next(iter(states.values())) if states else torch.zeros(self.share, dtype=dtype, device=device)
        flat = torch.zeros(self.share, dtype=dtype, device=device)
        for number, begin in self._begins():
            if number in states:
                here = in_order(states[number], self.sharded.slots[number])
                flat[begin : begin + here.numel()] = here.to(device)
        return flat

    def gathered(self, piece: torch.Tensor) -> torch.Tensor:
        if self.group is None or self.group.size() == 1:
            return piece
        device = self.state.unit.device
        piece = piece.contiguous().to(device)
        whole = torch.empty(piece.numel() * self.group.size(), dtype=piece.dtype, device=device)
        transport_for(self.group, device).gather([whole], [piece]).wait()
        return whole

    def part(self, whole: torch.Tensor, number: int) -> torch.Tensor:
        """One parameter's state, in its shape."""
        cut = self.sharded.slots[number].cut
        return whole.as_strided(cut.shape, cut.stride, cut.begin).clone()  # type: ignore[arg-type, union-attr]

    def mine(self, whole: torch.Tensor, number: int) -> torch.Tensor:
        """This rank's elements of one parameter's state, in a row."""
        slot, rank = self.sharded.slots[number], self.state.transports[0].rank
        first, count = slot.cut.elements(rank)  # type: ignore[union-attr]
        return in_order(whole, slot)[first : first + count]

    def flat_piece(self, parts: dict[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """This rank's piece of the flat parameter's state, from whole states of the original ones."""
        flat = torch.zeros(self.share, dtype=dtype, device=self.sharded.flat.local.device)
        for number, begin in self._begins():
            if number in parts:
                here = self.mine(parts[number], number)
                flat[begin : begin + here.numel()] = here.to(flat.device)
        return flat

    def whole(self, value: Any) -> Any:
        """A state that may be sharded, made whole."""
        group = self.state.call.groups.own
        return whole_of(value, group, self.state.unit.device)

    def _begins(self) -> Iterator[tuple[int, int]]:
        region = self.sharded.master.regions[0]
        yield from region.begins(region.runs[0], self.state.transports[0].rank)


def in_order(tensor: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Elements of a parameter, or of some state of it, as they lie in the unit."""
    if tensor.shape != torch.Size(slot.cut.shape) or tensor.ndim == 1:
        return tensor.reshape(-1)
    stride = slot.cut.stride
    if tuple(tensor.stride()) != stride:
        laid = torch.empty_strided(slot.cut.shape, stride, dtype=tensor.dtype, device=tensor.device)  # type: ignore[arg-type]
        tensor = laid.copy_(tensor)
    return tensor.as_strided((slot.cut.numel,), (1,), tensor.storage_offset())


def owned_by(model: nn.Module) -> list[Owned]:
    """The units below `model` that have parameters, in the order of `modules()`."""
    paths = {id(module): clean_tensor_name(f"{name}.") if name else "" for name, module in model.named_modules()}
    found = []
    for state in wrapper_states(model):
        sharded = flat_sharded_of(state.unit)
        if sharded is not None:
            names = [f"{paths.get(id(slot.homes[0].module()), '')}{slot.homes[0].name}" for slot in sharded.slots]
            found.append(Owned(state, sharded, tuple(names)))
    return found
