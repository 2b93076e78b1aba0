"""Watches training steps for non-finite values and names the unit, the parameter and the ranks where they began."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import __version__
from ..engine.api import FlatShardedParams, ManagedParam, observer, side_stream, tensors_in
from ..errors import ArgumentError, StateError
from ..torch_private import (
    inside_backward,
    local_of,
    local_part,
    never_compiled,
    queue_backward_callback,
    round_of,
    scale_of,
)
from .nonfinite import Finding, Seen, Stage, changes_of, clean, findings_of, first_stage, text_of
from .nonfinite_checks import Batch, Check, Layout, Place, PlaceOf, Record, batches_of, packed_batch, save_first
from .norms import Statistics, tensor_norms
from .precision_plan import ParamPlan, UnitPlan, owned_modules, plan_of
from .precision_report import unit_title
from .rank_reports import PATIENCE, Exchange

_log = logging.getLogger("unshard")
_sharded_gradient = attrgetter("sharded.grad")  # no Python function: called for every parameter in every step
_AFTER_ERROR = timedelta(seconds=2)  # how long rank 0 then waits for reports, if it has a finding to log


class Watch(observer.Observer):
    """Checks steps from its creation until `stop()` or the end of the `with` block. Change nothing in between."""

    on_compute_stream = False

    def __init__(self, model: nn.Module, optimizer: Any, scaler: Any, dump: Path | None, exact: bool):
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self._dump, self._is_exact = dump, exact
        self._plan = plan_of(model)
        groups = [group for unit in self._plan.units for group in unit.state.unit.param_groups]
        self._exchange = Exchange(r for each in groups for t in (each.shards, each.replicas) for r in t.compared_ranks)
        self._params: dict[ManagedParam, tuple[str, ParamPlan]] = {}
        self._flat: dict[Any, tuple[list[ManagedParam], int]] = {}
        """Params of each flat parameter in the order of its elements, and this rank's number in the unit."""
        self._forwards: list[tuple[str, Sequence[torch.Tensor]]] = []
        """Outputs of units in the running forward, which is over before anything could free them."""
        self._reduced: list[ManagedParam] = []
        self._record, self._pending = Record(1), deque[Record]()
        self._layouts: dict[tuple[Batch, ...], Layout] = {}
        self._last_seen: set[Any] = set()
        self._first_reduced: Any = None
        self._batches: dict[Any, list[Batch]] = {}
        self._most_batches = 1000 + 16 * len(self._plan.units)
        self._delivered = self._stepped = self._is_closed = False
        self._round = None if scaler is None else round_of(scaler)
        self._scales: list[tuple[int, float]] = [(0, scaler.get_scale())] if scaler is not None else []
        self._inputs: dict[str, Any] = {}
        self._saved, self._logged, self._last_read = -1, 0, 0
        self._norms: list[dict[str, Any]] = []
        self._handles: list[Any] = [register_optimizer_step_pre_hook(self._before_step)]
        self._prepare()
        observer.add(self)
        self._on = True

    def _prepare(self) -> None:
        tops: dict[nn.Module, None] = {self._model: None}
        for unit in self._plan.units:
            title = clean(unit_title(unit.name))
            for each in unit.params:
                self._params[each.param] = title, each
            for group in unit.state.unit.param_groups:
                if isinstance(group.sharded, FlatShardedParams) and not group.sharded.originals:
                    self._flat[group.sharded.flat] = group.params, group.shards.rank
            if self._is_exact:
                self._watch_modules(unit, title)
            for module in unit.state.modules():
                tops.update({module: None} if unit.outermost else {})
                hook = partial(self._after_forward, title, unit.outermost)
                self._handles.append(module.register_forward_hook(hook))
                if self._is_exact:  # after the hook above
                    check = partial(self._check_now, title)
                    self._handles.append(module.register_forward_hook(check, with_kwargs=True))
        for module in tops:
            self._handles.append(module.register_forward_pre_hook(partial(self._before_forward), with_kwargs=True))
            # Also after an exception: kept outputs would keep the autograd graph.
            self._handles.append(module.register_forward_hook(partial(self._after_top), always_call=True))

    def _watch_modules(self, unit: UnitPlan, title: str) -> None:
        names = {module: clean(name) for name, module in self._model.named_modules()}
        tops = unit.state.modules()
        for _, _, module in owned_modules(unit.state):
            if module not in tops and module in names:
                self._handles.append(module.register_forward_hook(partial(self._after_module, title, names[module])))
                self._most_batches += 16

    # -- results ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        if not self._on:
            raise StateError("This watch has ended. Create another one for each block.")
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._stop(wait=kind is None)

    def stop(self) -> None:
        """Stop watching. Wait up to 10 seconds for the reports of other ranks, which call `stop`, too."""
        self._stop(wait=True)

    def _stop(self, wait: bool) -> None:
        if not self._on:
            return
        self._on = False
        observer.remove(self)
        while self._handles:
            self._handles.pop().remove()
        self._inputs.clear()
        self._flush()
        self._exchange.read()
        to_log = self._exchange.rank == 0 and max(self._exchange.reports, default=0) > self._logged
        done = self._exchange.end(PATIENCE if wait else _AFTER_ERROR if to_log else timedelta(0))
        if wait and not done and not self._exchange.leave_out_absent():
            _log.warning("watch: not all ranks have called stop(), so reports of other ranks may be missing.")
        self._tell(settled=True)

    @property
    def findings(self) -> list[Finding]:
        """The first non-finite value of each step. Waits for the device.

        Reports of other ranks arrive within two steps, and at the latest when all ranks have called `stop`.
        """
        self._flush()
        complete = self._exchange.complete(self._last_read)
        return findings_of(self._exchange.reports, self._exchange.world, complete)

    @property
    def steps(self) -> int:
        """The number of steps that were watched."""
        return self._record.step - (0 if self._delivered or self._is_closed else 1)

    @property
    def scaler(self) -> list[dict[str, Any]]:
        """The scale after each step that changed it, and why the scaler skipped the step."""
        return changes_of(self._scales, self.findings)

    def norms(self) -> dict[str, dict[str, Statistics | None]]:
        """Return norm, maximum (of absolute values) and mean of each parameter's `gradient` and `value`, by name.

        The numbers are those of the unsharded model. Call this on all ranks, between backward and `zero_grad`. It runs
        one all-gather and waits for the device. The gradient is None if no rank has one.
        """
        found = {clean(name): each for name, each in tensor_norms(self._plan).items()}
        self._norms += [{"step": self._record.step, "name": name, **each} for name, each in found.items()]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return all results as plain JSON types."""
        return {
            "kind": "watch",
            "unshard": __version__,
            "steps": self.steps,
            "findings": [each.to_dict() for each in self.findings],
            "norms": list(self._norms),
            "scaler": self.scaler,
            "initial_scale": self._scales[0][1] if self._scales else None,
        }

    def __str__(self) -> str:
        return text_of(self.steps, self.findings, self.scaler)

    # -- the program's hooks ------------------------------------------------------------------------------------

    @never_compiled
    def _before_step(self, optimizer: Any, *unused: Any) -> None:
        if self._optimizer is None or optimizer is self._optimizer:
            self._stepped = True

    @never_compiled
    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if side_stream.recording:
            raise StateError(
                "watch() cannot check the steps of unshard.capture, because a replay runs no hooks. Stop the watch, or "
                "train without capture while you look for non-finite values."
            )
        if inside_backward():
            return
        self._reduced.clear()  # of a backward that failed
        if (self._delivered or self._is_closed) and self._is_consumed():
            self._next_step()
        if module is self._model and torch.is_grad_enabled():
            self._check_inputs(tuple(local_part(each.detach()) for each in tensors_in((args, kwargs))))

    def _check_inputs(self, inputs: tuple[torch.Tensor, ...]) -> None:
        key = (Stage.INPUT, *(each.dtype for each in inputs), *(each.device for each in inputs))
        self._check(key, Stage.INPUT, list(inputs), lambda index: ("", str(index), inputs[index].dtype))

    def _is_consumed(self) -> bool:
        """Return True if the gradients of the last backward have been used: by a step, a skipped one or zero_grad."""
        if self._stepped or (self._scaler is not None and round_of(self._scaler) is not self._round):
            return True
        return self._first_reduced.sharded.grad is None

    @never_compiled
    def _after_forward(self, unit: str, outermost: bool, module: nn.Module, args: Any, output: Any) -> None:
        if inside_backward() or not torch.is_grad_enabled():
            return  # recomputed by activation checkpointing, or an evaluation
        outputs = (output,) if isinstance(output, torch.Tensor) else tuple(tensors_in(output))
        self._forwards.append((unit, outputs))
        for each in outputs if outermost else ():
            if each.requires_grad:
                each.register_hook(partial(self._check_output_gradient, unit))

    @never_compiled
    def _check_now(self, unit: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._dump is not None and self._forwards:
            self._inputs[unit] = [each.detach() for each in tensors_in((args, kwargs))]
        self._check_forwards()

    @never_compiled
    def _after_module(self, unit: str, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if inside_backward() or not torch.is_grad_enabled():
            return
        tensors = [local for each in tensors_in(output) if (local := local_part(each.detach())).numel()]
        key = (Stage.FORWARD, unit, name, *(each.dtype for each in tensors), *(each.device for each in tensors))
        self._check(key, Stage.FORWARD, tensors, lambda index: (unit, name, tensors[index].dtype))

    @never_compiled
    def _after_top(self, *unused: Any) -> None:
        self._check_forwards()

    @never_compiled
    def _check_output_gradient(self, unit: str, gradient: torch.Tensor) -> None:
        if self._on:
            local = local_part(gradient)
            self._check((Stage.OUTPUT, unit, local.dtype), Stage.OUTPUT, [local], lambda index: (unit, "", local.dtype))

    # -- called by the engine -----------------------------------------------------------------------------------

    def packed(self, params: Sequence[ManagedParam], gradients: Any, largest: torch.Tensor | None) -> None:
        if not params or params[0] not in self._params:
            return  # of another model
        if self._forwards:
            self._check_forwards()
        if largest is not None and not self._is_exact and len(gradients) == len(params):
            self._check_packed(params, gradients, largest)
            return
        if isinstance(gradients, dict):
            params, gradients = [params[index] for index in gradients], list(gradients.values())
        self._check_gradients(Stage.LOCAL, params, gradients)

    def _check_packed(self, params: Sequence[ManagedParam], gradients: Any, largest: torch.Tensor) -> None:
        key = "packed", gradients[0].dtype, *params
        if key not in self._batches:
            known = [self._params[param] for param in params]
            places = [(unit, plan.name, gradients[index].dtype) for index, (unit, plan) in enumerate(known)]
            self._batches[key] = [packed_batch(largest.device, places)]
        self._record.add(self._batches[key][0], largest)

    def delivered(self, params: Sequence[Any]) -> None:
        """Check reduced gradients at the end of backward, all units together."""
        if not params or (params[0] not in self._params and params[0] not in self._flat):
            return
        is_first = not self._reduced
        self._reduced += params
        if is_first and inside_backward():
            queue_backward_callback(self._check_reduced)
        elif is_first:
            self._check_reduced()

    def _check_reduced(self) -> None:
        params, self._reduced = self._reduced, []
        if not params:
            return
        self._delivered, self._first_reduced = True, params[0]
        gradients = list(map(_sharded_gradient, params))
        if self._flat or any(map(is_, gradients, repeat(None))):
            params, gradients = self._parts_of(params, gradients)
        is_plain = set(map(type, gradients)) != {DTensor}
        tensors = list(map(local_part if is_plain else local_of, gradients))
        self._check_gradients(Stage.REDUCED, params, tensors)

    def _parts_of(self, params: Sequence[Any], gradients: Sequence[Any]) -> tuple[list[Any], list[torch.Tensor]]:
        owners: list[Any] = []
        tensors: list[torch.Tensor] = []
        for param, gradient in zip(params, gradients, strict=True):
            if gradient is None:
                continue  # an optimizer has stepped in backward
            members, rank = self._flat.get(param, ([], 0))
            for each in members:
                sharding: Any = each.sharding
                begin = max(sharding.begin - rank * sharding.shard_numel, 0)
                tensors.append(gradient[begin : begin + sharding.elements(rank)[1]])
            owners += members or [param]
            tensors += [] if members else [gradient]
        return owners, tensors

    def _check_gradients(self, stage: Stage, params: Sequence[ManagedParam], tensors: list[torch.Tensor]) -> None:
        def place_of(index: int) -> Place | None:
            unit, plan = self._params.get(params[index], ("", None))
            wire = plan.dtypes.wire if plan is not None and stage is Stage.REDUCED else tensors[index].dtype
            return None if plan is None else (unit, plan.name, wire)

        if tensors:
            self._check((stage, tensors[0].dtype, *params), stage, tensors, place_of)

    def _check_forwards(self) -> None:
        forwards, self._forwards = self._forwards, []
        found = [(unit, local) for unit, outputs in forwards for each in outputs if (local := local_part(each)).numel()]
        if not found:
            return
        units, tensors = zip(*found, strict=True)
        key = (Stage.FORWARD, *units, *(each.dtype for each in tensors), *(each.device for each in tensors))
        self._check(key, Stage.FORWARD, list(tensors), lambda index: (units[index], "", tensors[index].dtype))

    def _check(self, key: Any, stage: Stage, tensors: list[torch.Tensor], place_of: PlaceOf) -> None:
        """Queue the kernels that find the largest absolute value of each tensor. Equal keys have equal batches."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._check(key, stage, tensors, place_of)
        batches = self._batches.get(key)
        if batches is None:
            if len(self._batches) > self._most_batches:
                self._batches.clear()
            batches = self._batches[key] = batches_of(stage, tensors, place_of)
        record = self._record
        for batch in batches:
            mine = batch.members(tensors)
            maxima = batch.maxima(mine)
            if self._is_exact and stage is not Stage.INPUT and not bool(maxima.isfinite().all()):
                self._count(len(record.checks), batch.checks, mine)
            record.add(batch, maxima)

    def _count(self, first: int, checks: Sequence[Check], tensors: list[torch.Tensor]) -> None:
        self._record.count_exactly(first, checks, tensors)
        if self._dump is None or checks[0].is_module:
            return  # only the outputs and inputs of units are saved
        step, before, self._saved = self._record.step, self._saved, self._record.step
        if step - before not in (0, 1):  # the step before has not saved any
            save_first(self._dump, self._exchange.rank, step, checks, tensors, self._inputs)

    # -- records, which are read a step late --------------------------------------------------------------------

    def _next_step(self) -> None:
        self._close()
        self._delivered = self._stepped = self._is_closed = False
        if self._scaler is not None:
            self._round = round_of(self._scaler)
        self._record = Record(self._record.step + 1)
        first = not self._last_read
        while len(self._pending) > 1:
            self._read(self._pending.popleft())
        if first and self._last_read:  # the device has completed a step, so all ranks have begun it
            self._exchange.leave_out_absent()
        if self._exchange.rank == 0:
            self._exchange.read()
            self._tell(settled=False)

    @torch.no_grad()
    def _close(self) -> None:
        """Queue the copy of the running record to the host."""
        self._forwards.clear()
        if self._record.pack(None if self._scaler is None else scale_of(self._scaler), self._layouts):
            self._pending.append(self._record)
        self._record = Record(self._record.step)
        self._is_closed = True

    def _flush(self) -> None:
        if self._delivered or (self._record.has_checks and not self._on):
            self._delivered = False
            self._close()
        while self._pending:
            self._read(self._pending.popleft())

    def _read(self, record: Record) -> None:
        values, scale = record.read()
        if scale is not None:
            self._scales = [each for each in self._scales if each[0] != record.step] + [(record.step, scale)]
        self._last_read, layout = record.step, record.layout
        if not record.batches:
            return
        before = layout.largest
        seen: list[Seen] = []
        if not math.isfinite(values.max()):  # NaN is the maximum of everything
            seen = first_stage(record.seen(values.tolist(), None if before is None else before.tolist()))
        if not seen:
            layout.largest = values if before is None else torch.maximum(before, values)
            self._last_seen = set()
            return
        places = {each.place for each in seen}
        if places != self._last_seen:  # a step with NaN weights repeats the one before
            self._exchange.report(record.step, seen)
        self._last_seen = places

    def _tell(self, settled: bool) -> None:
        """Log findings whose reports should have arrived, once each, on rank 0."""
        exchange, due = self._exchange, math.inf if settled else self._exchange.due(self._last_read)
        if exchange.rank != 0 or not any(self._logged < step <= due for step in exchange.reports):
            return
        complete = exchange.complete(self._last_read)
        for each in findings_of(exchange.reports, exchange.world, complete):
            if self._logged < each.step <= due:
                _log.warning("watch: %s", each.text)
        self._logged = int(min(due, max(exchange.reports)))


def watch(
    model: nn.Module,
    optimizer: Any = None,
    *,
    scaler: Any = None,
    dump: str | Path | None = None,
    exact: bool = False,
) -> Watch:
    """Watch the steps of a sharded `model` for non-finite values. Example: `with watch(model) as found: train(model)`.

    Call this on all ranks. A step ends when `optimizer` (by default, any optimizer) steps, when `scaler` is updated, or
    when gradients are cleared. `exact` makes the host wait for every check, counts elements and names modules. `dump`
    is a folder for tensors of the unit that failed first, and implies `exact`. Raises an ArgumentError for other types.
    """
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentError(f"scaler must be a gradient scaler, such as unshard.optim.GradScaler, got {scaler!r}.")
    if dump is not None and not isinstance(dump, str | os.PathLike):
        raise ArgumentError(f"dump must be a folder, got {type(dump).__name__}.")
    if dump is not None:
        try:
            Path(dump).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"dump must be a folder that this rank can create: {error}.") from error
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    return Watch(model, optimizer, scaler, None if dump is None else Path(dump), exact or dump is not None)
