"""`summon_full_params`: whole parameters under their original names, to look at and to write to."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..engine.faces import Home, Slot, home_of
from ..engine.flat_sharded import FlatSharded
from ..engine.precision import Precision
from ..engine.states import Phase
from ..errors import ConflictError, UnsupportedError
from ..torch_private import own_parameters
from .flatten import FLAT_PARAM, flat_sharded_of
from .wrapper_state import WrapperState, wrapper_state_of, wrapper_states


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """In here the wrapped modules below `module` hold whole parameters, as they were before they were wrapped.

    What is written to them is kept, unless `writeback` is False. All ranks have to enter together.
    """
    if writeback and rank0_only:
        raise UnsupportedError("writeback=True with rank0_only=True: the ranks would have different parameters.")
    if offload_to_cpu and not rank0_only:
        warnings.warn(
            "offload_to_cpu without rank0_only copies the whole model to the host on every rank.", stacklevel=3
        )
    own = wrapper_state_of(module)
    states = wrapper_states(module) if recurse else ([] if own is None else [own])
    for state in states:
        _check(state, offload_to_cpu, with_grads)
    if own is not None:
        own.find_root(module)
    with ExitStack() as stack:
        for state in states:
            if not state.handle:  # nothing to gather, but names to look at
                stack.callback(setattr, state, "summoned", False)
                state.summoned = True
        shown = [Summoned(state, writeback, rank0_only, offload_to_cpu, with_grads) for state in states if state.handle]
        for each in shown:
            each.gather()
        for each in shown:
            stack.callback(each.put_away)
            each.show()
        yield


def _check(state: WrapperState, offload: bool, with_grads: bool) -> None:
    if state.summoned:
        raise ConflictError(f"{state.unit} is summoned already; summon_full_params cannot be nested.")
    if state.unit.phase is not Phase.IDLE:
        raise ConflictError(f"{state.unit} is computing; summon_full_params is not for use inside forward or backward.")
    if with_grads and (offload or not state.call.use_orig_params):
        raise UnsupportedError("with_grads=True needs use_orig_params=True and no offload_to_cpu.")
    if offload and not state.call.groups.meaning.cuts:
        raise UnsupportedError("offload_to_cpu=True is not for NO_SHARD, whose parameters are whole anyway.")


class Summoned:
    """One unit while it is whole for a user."""

    def __init__(self, state: WrapperState, writeback: bool, rank0_only: bool, offload: bool, with_grads: bool):
        self._state, self._unit = state, state.unit
        sharded = flat_sharded_of(state.unit)
        assert sharded is not None
        self._sharded: FlatSharded = sharded
        self._writeback, self._offload, self._with_grads = writeback, offload, with_grads
        self._rank = state.transports[0].rank
        self._looks = not rank0_only or self._rank == 0
        self._precision = self._unit.precision

    def gather(self) -> None:
        """In the dtype that is stored. Whatever was gathered before is dropped: weights may have changed since."""
        unit, kinds = self._unit, self._sharded.master.segments.kinds[0]
        unit.reshard()
        if kinds.compute != kinds.original:
            unit.select(Precision.STORED)
        unit.gather()

    def show(self) -> None:
        self._state.summoned = True
        self._unit.use()
        if not self._looks:
            self._unit.reshard()
            return
        for home, slot in self._names():
            face = slot.full
            assert face is not None
            if self._offload and face.device.type != "cpu":
                face = nn.Parameter(face.detach().cpu(), requires_grad=face.requires_grad)
            _register(home, face)
        if not self._sharded.originals:
            own_parameters(self._home()).pop(FLAT_PARAM, None)
        if self._with_grads:
            self._show_gradients()

    def put_away(self) -> None:
        if self._looks:
            self._take_back()
        self._unit.reshard()
        self._unit.select(self._precision)
        self._state.summoned = False

    @torch.no_grad()
    def _take_back(self) -> None:
        sharded = self._sharded
        if self._writeback:
            for home, slot in self._names():
                _write_back(home, slot)
            if self._with_grads:
                self._keep_gradients()
        for _, slot in self._names():
            if slot.full is not None:
                slot.full.grad = None
        if not sharded.originals:
            for home, _ in self._names():
                module = home.module()
                if module is not None:
                    own_parameters(module).pop(home.name, None)
            own_parameters(self._home())[FLAT_PARAM] = sharded.flat.sharded
        if self._writeback:
            padded, share = sharded.flat.padded, sharded.flat.local.numel()
            assert padded is not None
            sharded.flat.local.copy_(padded[self._rank * share : (self._rank + 1) * share])

    def _home(self) -> nn.Module:
        module = self._sharded.flat.homes[0].module()
        assert module is not None
        return module

    def _names(self) -> list[tuple[Home, Slot]]:
        return [(home, slot) for slot in self._sharded.slots for home in slot.homes]

    # -- gradients ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _show_gradients(self) -> None:
        """Whole gradients, where any rank has some."""
        shards, share = self._state.transports[0], self._sharded.flat.local.numel()
        dtype, device = self._sharded.master.segments.kinds[0].gradient, self._unit.device
        mine = torch.zeros(share, dtype=dtype, device=device)
        any_here = False
        for slot, begin in self._begins():
            gradient = slot.sharded.grad
            if gradient is not None:
                any_here = True
                mine[begin : begin + gradient.numel()] = _in_order(gradient, slot)
        has = torch.tensor([int(any_here)], dtype=torch.int32, device=device)
        shards.all_reduce([has], average=False).wait()
        if not has.item():
            return
        whole = mine.repeat(shards.world)
        shards.gather([whole], [mine]).wait()
        for slot in self._sharded.slots:
            cut = slot.cut
            assert slot.full is not None
            if slot.sharded.requires_grad:
                part = whole[cut.begin : cut.begin + cut.numel]  # type: ignore[union-attr]
                slot.full.grad = part.as_strided(cut.shape, cut.stride, part.storage_offset())  # type: ignore[arg-type]

    def _keep_gradients(self) -> None:
        for slot, _ in self._begins():
            whole, mine = slot.full.grad if slot.full is not None else None, slot.sharded.grad
            if whole is not None and mine is not None:
                first, count = slot.cut.elements(self._rank)  # type: ignore[union-attr]
                flat = whole.as_strided((slot.cut.numel,), (1,), whole.storage_offset())
                part = flat[first : first + count]
                mine.copy_(part if mine.ndim == 1 and mine.shape == part.shape else whole)

    def _begins(self) -> Iterator[tuple[Slot, int]]:
        region = self._sharded.master.regions[0]
        for index, begin in region.begins(region.runs[0], self._rank):
            yield self._sharded.slots[index], begin


def _in_order(gradient: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Elements as they lie in the unit."""
    if gradient.ndim == 1:
        return gradient
    return gradient.as_strided((slot.cut.numel,), (1,), gradient.storage_offset())


def _register(home: Home, face: nn.Parameter) -> None:
    """As a parameter that `named_parameters` lists, whatever the home usually is."""
    module = home.module()
    if module is not None:
        home.put(face)
        module.__dict__.pop(home.name, None)
        home_of(module, home.name).put(face)


def _write_back(home: Home, slot: Slot) -> None:
    """A parameter that was assigned, or given other memory, in here."""
    module = home.module()
    current = None if module is None else own_parameters(module).get(home.name)
    if current is None or slot.anchor is None:
        return
    if current.shape != slot.anchor.shape:
        raise ConflictError(
            f"Parameter {slot.name!r} has the shape {tuple(current.shape)} now, expected {tuple(slot.anchor.shape)}."
        )
    if current.data_ptr() != slot.anchor.data_ptr() and slot.cut.numel:
        slot.anchor.copy_(current.detach())
