"""`unshard.step` is one optimizer step in which ranks may run any number of micro-batches and skip any units.

The gradients of kept units are summed on each rank and reduced at the end. The gradients of followed units are reduced
in every round and stay partial sums until the end. Finally, the step divides all gradients by the sum of the weights
and sets them as `.grad`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..comm.agreement import gathered
from ..comm.interface import Label
from ..errors import ArgumentError, StateError, UnsupportedError, listed
from .param_group import ParamGroup
from .params.param import ManagedParam
from .root import Root
from .rounds import Rounds, merged
from .scope import Scope
from .states import GradState, ParamState, Phase, Precision
from .unit import Unit


class StepPlan:
    """Labels and results that steps of a model pass on to later steps with the same arguments."""

    def __init__(self, followed: list[Unit]):
        self.followed = followed
        """Followed units in the order in which ranks run them."""
        self.ordered = not followed
        """True if `followed` is already in this order. In the first step, `followed` is in the order of definition."""
        self.late: set[Unit] = set()
        """Followed units whose gradients are complete only at the end of backward."""
        self.label = Label(lambda: "add up the losses and weights of unshard.step")
        self.rounds_label = Label(lambda: "compare the numbers of micro-batches of unshard.step")


class UnevenStep(Scope):
    """The context that `unshard.step` returns. Inside, ranks may run any number of micro-batches and skip any units."""

    name = "unshard.step"

    def __init__(
        self,
        root: Root,
        precisions: Mapping[Unit, Precision],
        find_plan: Callable[[], StepPlan],
        backwards: int | None,
        scaler: Any,
        describe: Callable[[StepPlan], str],
    ):
        super().__init__(root, precisions)
        self._find_plan, self._backwards, self._scaler, self._describe = find_plan, backwards, scaler, describe
        self._plan = StepPlan([])
        self._writes: list[Any] = []
        self._params = [
            param
            for group in root.param_groups
            for param in group.params
            if param.sharded.requires_grad and param.sharding.numel
        ]
        self._present: set[ManagedParam] = set()
        """Params that have received a gradient on this rank."""
        self._reduced: dict[Unit, None] = {}
        """Kept units whose gradients are already reduced to partial sums, in the order of reduction."""
        self._complete: set[Unit] = set()
        """Kept units that receive no more gradients in the last backward."""
        self._repeated: set[Unit] = set()
        """Units that the last backward may reach more than once."""
        self._done = 0
        self._inside = False
        device = root.unit.device
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._weight_sum: torch.Tensor | float = 0.0
        self._rounds: Rounds | None = None
        self._result: tuple[torch.Tensor, torch.Tensor] | None = None

    # -- what programs call ---------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor = 1.0, *, retain_graph: bool = False) -> None:
        """Run backward of `loss`, which must be a sum over samples or tokens, not a mean.

        `weight` is the number of samples or tokens, or a tensor with this number. The gradient of the step is the sum
        of all ranks' gradients divided by the sum of their weights. So with the number of tokens as `weight`, it is the
        gradient of the mean over all tokens. With the default weight, it is the gradient of the mean over all calls.
        `retain_graph` is passed on to `torch.Tensor.backward`.
        """
        if self._ended or not self._options:
            raise StateError("step.backward was called outside of its `with unshard.step(model)` block.")
        if self._failed:
            raise StateError(self._why_failed())
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ArgumentError(f"step.backward needs a loss with one element, the sum over the samples; got {shape}.")
        if self._done == self._backwards:
            raise ArgumentError(f"unshard.step got backwards={self._backwards}, and backward was called more often.")
        if not loss.requires_grad:
            raise ArgumentError(
                "step.backward got a loss that does not require a gradient. Is grad mode off, as inside "
                "unshard.inference or torch.no_grad()? If a micro-batch has nothing to learn from, do not call "
                "step.backward for it."
            )
        weight = self._checked(weight)
        self._done += 1
        last = self._done == self._backwards and self._rounds is None
        if last:
            order = self._root.backward_order
            runs = Counter(order)
            # More forwards than the root remembers: then no unit is known to run only once.
            self._repeated = {u for n, u in enumerate(self._root.units) if runs[n] > 1 or len(order) == order.maxlen}
            for unit in self._kept:
                if unit.param_state is ParamState.GATHERING:  # never ran on this rank
                    unit.unshard()
                    self._complete.add(unit)
            vars(self._root).update(after_backward=self._reduce_in_last_backward)
        self._inside = True
        try:
            (loss if self._scaler is None else self._scaler.scale(loss)).backward(retain_graph=retain_graph)
        except BaseException:
            self._failed = True  # nobody knows which gradients were computed
            raise
        finally:
            self._inside = False
            if last:
                del self._root.after_backward
        self._weight_sum = self._weight_sum + weight
        value = loss.detach()
        if isinstance(value, DTensor):  # parallel over the ranks of tensor parallelism
            value = value.full_tensor()
        self._loss_sum += value.reshape(()).to(self._loss_sum.device)

    @property
    def loss(self) -> torch.Tensor:
        """Sum of all ranks' losses divided by the sum of all weights, or 0 if that is 0. Available after the block."""
        return self._after_block()[0]

    @property
    def weight(self) -> torch.Tensor:
        """Sum of all ranks' weights, available after the block. If it is 0, parameters in use get zero gradients."""
        return self._after_block()[1]

    def explain(self) -> str:
        """Return a table that shows how each unit runs in this step, and what that costs in memory and traffic."""
        if not self._options:
            raise StateError("step.explain() is possible once the block has been entered.")
        return self._describe(self._plan)

    def _after_block(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._result is None:
            raise StateError("step.loss and step.weight exist after the block, when the ranks have added them up.")
        return self._result

    def _checked(self, weight: Any) -> float | torch.Tensor:
        if isinstance(weight, torch.Tensor):
            if weight.numel() != 1:
                raise ArgumentError(f"weight must be a number or a tensor with one element, got {tuple(weight.shape)}.")
            return weight.detach().reshape(()).to(self._loss_sum.device, torch.float64)
        if not isinstance(weight, Real) or not 0 <= float(weight) < float("inf"):
            raise ArgumentError(f"weight must be a finite number, 0 or more, got {weight!r}.")
        return float(weight)

    @property
    def _begins(self) -> str:
        return f"begin {self.name}" if self._backwards is None else f"begin {self.name} with `backwards`"

    def before_backward(self) -> None:
        if not self._inside:
            raise StateError(
                "backward() was called directly inside unshard.step, which would not know the weight of this loss. "
                "Call step.backward(loss, weight=...) of this model instead. torch.autograd.grad through sharded units "
                "is not possible inside the block."
            )

    # -- begin ----------------------------------------------------------------------------------------------

    def _refuse(self) -> None:
        super()._refuse()
        groups = self._root.param_groups
        waiting = [group.unit_name for group in groups if group.gradients.state in (GradState.LOCAL, GradState.PARTIAL)]
        if waiting:
            raise StateError(
                f"unshard.step needs units without unreduced gradients, but {listed(map(repr, waiting))} accumulated "
                "some without synchronization before the block. Their weight is unknown. Run all backwards of the "
                "optimizer step inside the block, or call model.zero_grad() first."
            )
        if any(group.gradients.divided_by_transport for group in groups):
            raise UnsupportedError(
                "unshard.step cannot be combined with a communication hook, which divides gradients by itself."
            )
        for group in groups:
            group.gradients.unreduced = None  # may have another dtype than sums of a step

    def _prepare(self) -> None:
        self._plan = self._find_plan()
        self._followed = self._plan.followed
        self._kept = [unit for unit in self._root.units if unit not in self._followed]
        self._writes = [unit.writes() for unit in self._root.units]
        for group in self._root.param_groups:
            for param in group.params:
                # Units that this rank skips would not learn otherwise that a parameter was frozen or unfrozen.
                unsharded, trained = param.unsharded, param.sharded.requires_grad
                if unsharded is not None and unsharded.requires_grad != trained:
                    unsharded.requires_grad_(trained)

    def _begin(self) -> None:
        for unit in self._kept:
            unit.watch_writes()
        if self._followed:
            planned = 0
            if self._backwards is not None:
                planned = int(self._all_gathered([self._backwards], self._plan.rounds_label).max())
            # A rank with work need not read the answer, so its host does not wait.
            announce = partial(self._add_up, works=True)
            self._rounds = Rounds(self._root, self._followed, self._plan.late, planned, announce, self._note)

    # -- end ------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        root, plan, rounds = self._root, self._plan, self._rounds
        if self._scaler is not None and not self._done:
            self._scaler.scale(self._loss_sum)  # creates its tensors, which `scaler.step` needs
        for unit in self._kept:
            unit.unshard()  # units that never ran on this rank, too: their parameters follow `requires_grad` now
        written = [
            u.name for u, before in zip(root.units, self._writes, strict=True) if u.stale or u.writes() != before
        ]
        if written:
            raise StateError(
                f"Parameters of {listed(map(repr, written))} were written, frozen or unfrozen inside unshard.step. "
                "Some forwards may have used the old values, so the gradients of the step are dropped. Change "
                "parameters outside of the block."
            )
        for unit in self._kept:
            unit.reshard()
            self._note(unit)
            if unit in self._reduced and any(group.gradients.state is GradState.LOCAL for group in unit.param_groups):
                raise StateError(
                    f"{unit} got gradients after the last of backwards={self._backwards}. Call unshard.step without "
                    "`backwards`, so that gradients are reduced when the block ends."
                )
        if self._backwards is not None and rounds is None:  # the last backward has reduced some units
            for unit in reversed(self._kept):
                if unit not in self._reduced:
                    self._reduce(unit)
        if rounds is not None:
            rounds.run_planned()
        sums = self._add_up(works=False)
        while rounds is not None and sums[0].item() > 0:
            rounds.run_empty()
            sums = self._add_up(works=False)
        loss, weight, flags = sums[1], sums[2], sums[3:]
        divisor = torch.where(weight == 0, torch.inf, weight)  # keeps NaN, so that a bad weight shows
        absent: set[ManagedParam] = set()
        resumed = set(self._reduced)
        # The host reads the flags only if they matter: a param with a gradient on this rank has one in the step.
        if rounds is not None or not self._present.issuperset(self._params):
            counts = flags.tolist()
            absent = {param for param, count in zip(self._params, counts, strict=False) if not count}
            late = {unit for unit, count in zip(plan.followed, counts[len(self._params) :], strict=True) if count}
            plan.late |= late
            resumed.update(unit for unit in plan.followed if unit not in late)
        root.reductions.finish()
        for unit in reversed(root.units):
            self._finish(unit, divisor, absent, unit in resumed)
        root.reductions.finish()
        root.wait_for_copies()
        self._result = loss / divisor, weight
        if rounds is not None and not plan.ordered and rounds.count:
            self._learn_order(rounds)

    def _finish(self, unit: Unit, divisor: torch.Tensor, absent: set[ManagedParam], resumes: bool) -> None:
        """Reduce the remaining gradients of `unit`, divide them, and set `.grad` of all params that some rank used."""
        trained = [param for param in unit.params if param.sharded.requires_grad and param.sharding.numel]
        if absent.issuperset(trained):
            for group in unit.param_groups:
                group.gradients.drop_unreduced()
            return
        options: Any = unit.options
        users_hook = options.all_reduce_hook

        def divide(reduced: torch.Tensor) -> None:
            if users_hook is not None:
                users_hook(reduced)
            reduced.div_(divisor)

        options.change(hold=False, synchronize=True, absent=absent, all_reduce_hook=divide)
        self._root.reductions.make_room(unit)
        for group in unit.param_groups:
            if resumes:
                group.gradients.resume_held(options)
            else:
                group.gradients.reduce(options, True)
        self._root.reductions.scattering.append(unit)

    def _leave(self, error: BaseException | None) -> None:
        if self._rounds is not None:
            self._rounds.uninstall()
        super()._leave(error)

    def _note(self, unit: Unit) -> None:
        for group in unit.param_groups:
            self._present.update(group.gradients.present())

    def _reduce_in_last_backward(self, unit: Unit, at_end: bool = False) -> None:
        """Replace `Root.after_backward` in the last backward, in order to reduce kept units early.

        All ranks reduce kept units in the same order, so a unit waits until all units before it are reduced.
        """
        root = self._root
        ends = at_end or (unit.phase is Phase.BACKWARD and unit not in self._repeated)
        Root.after_backward(root, unit, at_end)
        if ends and unit.phase is Phase.IDLE:
            self._complete.add(unit)
        for each in reversed(self._kept):
            if each in self._reduced:
                continue
            if each.lends or each not in self._complete:
                return
            self._reduce(each)

    def _reduce(self, unit: Unit) -> None:
        """Reduce the gradients of a kept unit to partial sums. `_finish` later divides and delivers these."""
        self._note(unit)
        self._reduced[unit] = None
        options: Any = unit.options
        options.change(synchronize=True)
        self._root.reductions.make_room(unit)
        for group in unit.param_groups:
            group.gradients.reduce(options, False)
        self._root.reductions.scattering.append(unit)
        options.change(synchronize=False)

    # -- messages -------------------------------------------------------------------------------------------

    def _add_up(self, works: bool) -> torch.Tensor:
        """Return sums over the ranks in one tensor.

        The sums are: ranks with work, losses, weights, ranks with a gradient for each param, and ranks with late
        gradients for each followed unit.
        """
        flags = [float(param in self._present) for param in self._params]
        for unit in self._plan.followed:
            flags.append(float(any(group.gradients.state is GradState.LOCAL for group in unit.param_groups)))
        device = self._loss_sum.device
        # From pinned memory, because the host would wait for the device to copy from any other.
        values = torch.tensor([float(works), 0.0, 0.0, *flags], dtype=torch.float64, pin_memory=device.type == "cuda")
        values = values.to(device, non_blocking=True)
        values[1] = self._loss_sum
        values[2] = self._weight_sum
        group = widest(self._root.param_groups)
        for transport in (group.shards, group.replicas) if group is not None else ():
            transport.all_reduce([values], label=self._plan.label, average=False).wait()
        return values

    def _all_gathered(self, numbers: list[int], label: Label) -> torch.Tensor:
        values = torch.tensor(numbers, device=self._loss_sum.device)
        return all_gathered(self._root, values, label)

    def _learn_order(self, rounds: Rounds) -> None:
        """Make later steps run followed units in the order in which the ranks ran them."""
        plan, numbers = self._plan, {unit: number for number, unit in enumerate(self._plan.followed)}
        mine = [numbers[unit] for unit in rounds.ran]
        orders = self._all_gathered(mine + [-1] * (len(numbers) - len(mine)), plan.rounds_label)
        different = dict.fromkeys(map(tuple, orders.tolist()))  # merging equal orders again would change nothing
        found = [[number for number in order if number >= 0] for order in different]
        plan.followed = [plan.followed[number] for number in merged(found, len(numbers))]
        plan.ordered = True


def widest(groups: Iterable[ParamGroup]) -> ParamGroup | None:
    """Return the param group that is sharded and replicated over the most ranks. These ranks have different data."""
    return max(groups, key=lambda group: group.shards.world * group.replicas.world, default=None)


def all_gathered(root: Root, values: torch.Tensor, label: Label | None) -> torch.Tensor:
    """Return a tensor with one row of `values` for each rank of the widest param group."""
    group = widest(root.param_groups)
    rows = values.unsqueeze(0)
    for transport in (group.shards, group.replicas) if group is not None else ():
        if transport.world > 1:
            rows = gathered(transport, rows.flatten(), label).view(-1, values.numel())
    return rows
