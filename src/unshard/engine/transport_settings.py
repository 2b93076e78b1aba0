"""Settings of a unit's transports: custom collectives, the process group for reduce-scatters, and a memory pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..comm.interface import AllGather, Pool, ReduceScatter, Transport
from ..comm.transports import PluginTransport, separate_is_faster, transport_for
from ..errors import ConflictError, StateError
from .param_group import ParamGroup
from .states import GradState
from .unit import Unit

MakePool = Callable[[Any, torch.device], Pool | None]


class TransportSettings:
    """The transport settings that a user chose for a unit.

    Each change of a setting gives every param group of the unit a new transport.
    """

    def __init__(self, unit: Unit):
        self._unit = unit
        self.plugins: tuple[AllGather | None, ReduceScatter | None] = (None, None)
        self._separate: bool | None = None
        self._make_pool: MakePool | None = None

    def like(self, other: TransportSettings) -> None:
        """Copy the settings of the unit that this unit is a deep copy of. The transports are already copied."""
        self.plugins, self._separate, self._make_pool = other.plugins, other._separate, other._make_pool

    def install(self, gather: AllGather | None, reduce_scatter: ReduceScatter | None) -> None:
        """Use a custom all-gather, reduce-scatter, or both. None leaves the current collective unchanged."""
        if self._make_pool is not None:
            raise ConflictError(
                f"{self._unit} takes the memory of its collectives from a pool, but custom collectives allocate their "
                "own. Turn one of them off."
            )
        if reduce_scatter is not None and any(param.policy.wire_dtype for param in self._unit.params):
            raise ConflictError(
                f"{self._unit} has a policy with wire_dtype, which only the built-in reduce-scatter supports. Cast "
                "inside your collective instead, or leave wire_dtype None."
            )
        self._refuse_pending_gradients()
        self.plugins = (gather or self.plugins[0], reduce_scatter or self.plugins[1])
        self._change()

    def separate(self, separate: bool) -> None:
        """Give reduce-scatters their own process group if `separate`. Otherwise, use the group of all-gathers."""
        changes = separate != self._separates()
        if changes:
            self._refuse_pending_gradients()
        self._separate = separate
        if changes:
            self._change()

    def allocate_from(self, make_pool: MakePool | None) -> None:
        """Allocate the memory of collectives from the pool that `make_pool` returns. None selects torch's allocator."""
        if make_pool is not None and self.plugins != (None, None):
            raise ConflictError(f"{self._unit} has custom collectives, which allocate their own memory.")
        self._refuse_pending_gradients()
        self._make_pool = make_pool
        self._change()

    def _refuse_pending_gradients(self) -> None:
        # Unreduced gradients are in buffers of the current transport.
        if any(group.gradients.state in (GradState.LOCAL, GradState.PARTIAL) for group in self._unit.param_groups):
            raise StateError(
                f"The collectives of {self._unit} cannot be changed now: it has gradients of backwards that did not "
                "reduce them (set_requires_gradient_sync(False), set_requires_all_reduce(False)). Change them after a "
                "backward that reduces, or after zero_grad()."
            )

    def _change(self) -> None:
        self._unit.rest()
        for group in self._unit.param_groups:
            group.change_transport(self._transport(group))

    def _separates(self) -> bool:
        if self._separate is not None or self._make_pool is not None:
            # The backend registers the memory of a pool for one process group only.
            return bool(self._separate)
        meshes = [group.mesh for group in self._unit.param_groups if group.mesh is not None]
        return any(separate_is_faster(mesh.get_group(), self._unit.device) for mesh in meshes)

    def _transport(self, param_group: ParamGroup) -> Transport:
        if param_group.mesh is None:
            return param_group.shards
        group, device = param_group.mesh.get_group(), self._unit.device
        transport = transport_for(group, device, separate=self._separates())
        if self._make_pool is not None:
            transport.pool = self._make_pool(group, device)
        if self.plugins == (None, None):
            return transport
        return transport.wrapped(lambda base: PluginTransport(base, group, *self.plugins))
