"""Hooks on every optimizer's step: they count steps, let roots prepare for them, and check optimizers once."""

from __future__ import annotations

import weakref
from collections.abc import Set
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..comm.order.check import Order
from ..names import optimizer_parameters
from ..torch_private import inside_backward, never_compiled
from .checks.optimizers import check_optimizer, refuse_local_state, refuse_stepped_by_another
from .checks.root_checks import refuse_gradients_past_outputs
from .param_group import ParamGroup, param_groups_of
from .params.param import Replacements, Steps, steps_of_this_rank
from .reduce.sharded_grad import LISTENERS
from .root import Root
from .shard_lookup import orders_of_groups, roots_of_groups


class _Checked(NamedTuple):
    """The result of the last check of an optimizer."""

    parameters: int
    state: int
    """The id of `optimizer.state`, which loading replaces."""
    replacements: int
    """How many parameters of any model had been replaced."""
    groups: weakref.WeakSet[ParamGroup]
    """The param groups of its parameters."""
    steps: set[Steps]
    """Step counters of these param groups and of this rank."""
    orders: list[Order]
    """Compares the steps of the ranks, for each process group of these param groups."""


_shown = attrgetter("shown")
_checked: weakref.WeakKeyDictionary[Any, _Checked] = weakref.WeakKeyDictionary()
_guarded: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_optimizers() -> None:
    """Call this for every new unit: it invalidates earlier checks."""
    _register()
    _checked.clear()


@cache
def _register() -> None:
    """Once per process. Not compiled: a compiled step would trace the hooks and run them only once."""
    register_optimizer_step_pre_hook(never_compiled(_before_step))
    register_optimizer_step_post_hook(never_compiled(_after_step))


def _before_step(optimizer: Any, *unused: Any) -> None:
    count = sum([len(group["params"]) for group in optimizer.param_groups])
    seen = (count, id(optimizer.state), Replacements.seen)
    checked = _checked.get(optimizer)
    if checked is None or checked[:3] != seen:
        check_optimizer(optimizer, optimizer_parameters(optimizer))
        if optimizer not in _guarded:
            optimizer.register_state_dict_pre_hook(refuse_local_state)
            # Python may reuse the id of the old state, which is gone, for the loaded one.
            optimizer.register_load_state_dict_post_hook(_forget)
            _guarded.add(optimizer)
        checked = _checked[optimizer] = _look_at(optimizer)
    if not inside_backward():
        for root in roots_of_groups(checked.groups):
            if not root.in_backward and not root.in_forward:
                _prepare(root, optimizer)
            root.wait_for_uploads()  # of a forward since the backward
        for order in checked.orders:
            order.compare_step()
    if LISTENERS:
        refuse_stepped_by_another(optimizer)


def _prepare(root: Root, optimizer: Any) -> None:
    if any(map(_shown, root.units)):  # a loop in C, because it runs in every step
        for unit in root.units:
            unit.show_sharded()  # the program reads the stepped parameters next
    if root.awaited:
        _refuse_unreduced_gradients(root, set(map(id, optimizer_parameters(optimizer))))
    if root.open_graphs:
        _outdate_graphs(root, set(map(id, optimizer_parameters(optimizer))))


def _refuse_unreduced_gradients(root: Root, stepped: Set[int]) -> None:
    """Raise if parameters have gradients that no hook has seen, so that they are not reduced.

    A loss of parameters alone, of a unit that stays unsharded, gives such gradients. A backward that follows before the
    step reduces them as well.
    """
    for unit in root.units:
        if unit.has_untaken_gradients and not stepped.isdisjoint(id(param.sharded) for param in unit.params):
            root.reset()
            refuse_gradients_past_outputs(unit)


def _outdate_graphs(root: Root, stepped: Set[int]) -> None:
    """Count the step as a write to the unsharded parameters.

    Autograd then refuses the backward of a graph that has saved them, as it does without sharding. All-gathers do not
    count as writes, so such a backward would silently use the new values.
    """
    root.open_graphs = 0
    for group in [group for unit in root.units for group in unit.param_groups]:
        for param in group.params:
            if param.unsharded is not None and id(param.sharded) in stepped and group.sharded.is_stepped(param):
                increment_version(param.unsharded)


def _forget(optimizer: Any) -> None:
    _checked.pop(optimizer, None)


def _after_step(optimizer: Any, *unused: Any) -> None:
    if "unshard_step_in_backward" not in vars(optimizer):
        note_optimizer_step(optimizer)
        return
    # An optimizer that steps in backward has noted it already. Shards that were uploaded since are up to date.
    mine = set(map(id, optimizer_parameters(optimizer)))
    for root in roots_of_groups(_last_checked(optimizer).groups):
        root.upload_first_units(mine)


def note_optimizer_step(optimizer: Any) -> None:
    """Count a step that writes parameters, or has written them."""
    for steps in _last_checked(optimizer).steps:
        steps.taken += 1


def _last_checked(optimizer: Any) -> _Checked:
    """Return the last check; repeat it if another rank (in another thread) has built a unit since."""
    return _checked.get(optimizer) or _look_at(optimizer)


def _look_at(optimizer: Any) -> _Checked:
    parameters = optimizer_parameters(optimizer)
    groups = param_groups_of(parameters)
    steps = {steps_of_this_rank(), *(group.sharded.steps for group in groups)}
    orders = orders_of_groups(groups)
    return _Checked(len(parameters), id(optimizer.state), Replacements.seen, weakref.WeakSet(groups), steps, orders)
