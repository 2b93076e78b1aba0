"""Steps of units whose gradients have arrived on the host, while the backward of the others goes on."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from ..engine.arrivals import listen
from ..engine.grad_shard import GradShard
from ..errors import StateError
from . import host
from .shadow import Shadow
from .spans import Span


class Ahead:
    """Belongs to one flat optimizer. What its last step did to a gradient shard is done again when the shard arrives.

    So the first step is an ordinary one, and so is that of every unit that the last step did not see as it is now.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = weakref.ref(optimizer)
        self._known: list[tuple[weakref.ref[GradShard], list[tuple[Span, torch.Tensor]]]] = []
        self._steps: list[tuple[GradShard, list[Span], Future[Any]]] = []
        listen(self)

    def learn(self, shadow: Shadow) -> None:
        """After a step: which spans the gradients of each shard were for."""
        self._known = [(weakref.ref(shard), fed) for shard, fed in shadow.fed_by_shard() if shard.away]

    def arrived(self, shards: Sequence[GradShard]) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        parameters = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for shard in shards:
            fed = next((fed for known, fed in self._known if known() is shard), None)
            if fed is not None and shard.belongs_to(parameters):
                self._start(optimizer, shard, fed)

    def _start(self, optimizer: Any, shard: GradShard, fed: list[tuple[Span, torch.Tensor]]) -> None:
        if shard.stepped:
            raise StateError(
                f"The gradients of {shard.names()} arrived a second time before step(). With flat(..., ahead=True) "
                "every backward that synchronises gradients steps them: accumulate with "
                "set_requires_gradient_sync(False) in all backwards but the last, and call step() after each."
            )
        shard.stepped = True
        state: dict[Any, Any] = optimizer.shadow_state()
        groups = [{**group, "params": []} for group in optimizer.param_groups]
        for span, gradient in fed:
            groups[span.group]["params"].append(span.flat)
            span.flat.grad = gradient
        twin = optimizer.twin(groups, state)

        def step() -> None:
            shard.arrive()
            with torch.no_grad():
                optimizer.plain_step(twin)

        self._steps.append((shard, [span for span, _ in fed], host.submit(step)))

    def finish(self) -> list[Span]:
        """Wait for the steps taken so far; the spans that were stepped."""
        steps, self._steps = self._steps, []
        try:
            for _, _, future in steps:
                future.result()
        finally:
            for shard, _, future in steps:
                future.exception()  # all of them are over, one way or the other
                shard.stepped = False
        return [span for _, spans, _ in steps for span in spans]

    def settle(self) -> None:
        """A forward before `step`: let it meet whole parameters. What failed is raised by `step`."""
        for _, _, future in self._steps:
            future.exception()
