"""Steps of units whose gradients have arrived on the host, while the backward of the others goes on."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.arrivals import listen
from ..engine.grad_shard import GradShard
from ..engine.root import Root
from ..engine.writes import note_optimizer_step
from ..errors import StateError
from . import host
from .shadow import Shadow
from .spans import Span

Fed = list[tuple[Span, torch.Tensor]]


@dataclass(frozen=True)
class Step:
    """One that was taken, or is being taken, before `step` was called."""

    shard: GradShard
    spans: list[Span]
    options: list[dict[str, Any]]
    future: Future[Any]
    writes: int
    """To the gradients, so far."""


class Ahead:
    """Belongs to one flat optimizer. What its last step did to a gradient shard is done again when the shard arrives.

    So the first step is an ordinary one, and so is that of every unit that the last step did not see as it is now.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = weakref.ref(optimizer)
        self._known: list[tuple[weakref.ref[GradShard], Fed]] = []
        self._steps: list[Step] = []
        self._same: bool | None = None
        """Whether the optimizer is as its last step left it; asked once in a backward."""
        self._warned = self._warned_of_steps = False
        self._added = False
        """Whether a second backward has added to gradients, and was refused."""
        listen(self)

    def learn(self, shadow: Shadow) -> None:
        """After a step: which spans the gradients of each shard were for."""
        self._known = [(weakref.ref(shard), fed) for shard, fed in shadow.fed_by_shard() if shard.away]

    def arrived(self, shards: Sequence[GradShard]) -> None:
        optimizer = self._optimizer()
        if optimizer is None or not self._known:
            return
        if self._same is None:
            self._same = optimizer.shadow().fits(optimizer)
        if not self._same:
            return
        parameters = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for shard in shards:
            fed = next((fed for known, fed in self._known if known() is shard), None)
            if fed is not None and shard.belongs_to(parameters):
                self._start(optimizer, shard, fed)

    def _start(self, optimizer: Any, shard: GradShard, fed: Fed) -> None:
        if shard.stepped:
            self._added = True
            raise StateError(
                f"The gradients of {shard.names()} arrived a second time before step(), and with flat(..., ahead=True) "
                "backward has stepped them already. Call step() after every backward that synchronises gradients; "
                "accumulate with set_requires_gradient_sync(False) in all of them but the last. After an exception in "
                "backward, or for a batch you do not want, call the optimizer's step() or zero_grad() to go on (what "
                "was stepped stays so)."
            )
        shard.stepper = weakref.ref(self)
        options = [_options(group) for group in optimizer.param_groups]
        groups = [{**each, "params": []} for each in options]
        for span, gradient in fed:
            groups[span.group]["params"].append(span.flat)
            span.flat.grad = gradient
        twin = optimizer.twin(groups, optimizer.shadow().state)

        def step() -> None:
            shard.arrive()
            with torch.no_grad():
                optimizer.plain_step(twin)

        writes = shard.writes()
        self._steps.append(Step(shard, [span for span, _ in fed], options, host.submit(step), writes))

    def finish(self, optimizer: Any) -> list[Span]:
        """Wait for the steps taken so far; the spans that were stepped."""
        steps, self._steps, self._same, self._added = self._steps, [], None, False
        if steps:
            note_optimizer_step()  # even if `step` is never called
        stepped: set[int] = set()
        try:
            for step in steps:
                step.future.result()
                news = set(map(id, step.shard.parameters()))
                stepped |= news
                for root in Root.living:
                    root.send_first(stepped, news)
        finally:
            for step in steps:
                step.future.exception()  # all of them are over, one way or the other
                step.shard.stepper = None
        if steps and not self._warned and _changed(steps[0].options, optimizer.param_groups):
            self._warned = True
            warnings.warn(
                "Options of parameter groups were changed between backward and step(). With flat(..., ahead=True) "
                "backward steps units with the options of that time: change them before backward.",
                stacklevel=4,
            )
        return [span for step in steps for span in step.spans]

    def refuse_written(self) -> None:
        """Before `step`: nobody will use what gradients were made since they were used."""
        written = [step.shard for step in self._steps if step.shard.writes() != step.writes]
        if written and not self._added:
            raise StateError(
                f"The gradients of {written[0].names()} were changed between backward and step(), and with ahead=True "
                "backward has stepped them as they were. Change them in hooks (register_post_accumulate_grad_hook), "
                "or leave out ahead=True. To go on, call the optimizer's zero_grad(); what was stepped stays so."
            )

    def warn_of_steps(self) -> None:
        """They were found by `zero_grad`, and no `step` was called."""
        if not self._warned_of_steps:
            self._warned_of_steps = True
            warnings.warn(
                "zero_grad() was called without step() after a backward, and with ahead=True backward has stepped "
                "parameters already: that counts as a step. A batch cannot be left out. If the backward was another "
                "optimizer's and only went through this model (as a generator's does through the discriminator), "
                "freeze this model's parameters for it, or leave out ahead=True.",
                stacklevel=4,
            )

    def settle(self) -> None:
        """Somebody looks at parameters before `step`: let them be whole. What failed is raised by `step`."""
        for step in self._steps:
            step.future.exception()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """As they are now: a tensor, which a learning rate may be, can be changed in place while the step runs."""
    items = ((key, value) for key, value in group.items() if key != "params")
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in items}


def _changed(before: list[dict[str, Any]], groups: list[dict[str, Any]]) -> bool:
    for one, other in zip(before, groups, strict=False):
        for key, value in one.items():
            now = other.get(key)
            if isinstance(value, torch.Tensor):
                # Those on a device would have to be waited for.
                if value.is_cpu and isinstance(now, torch.Tensor) and now.is_cpu and not torch.equal(value, now):
                    return True
            elif now is not value and now != value:
                return True
    return False
