"""Decides whether a call of a step runs eagerly, is recorded, or replays a recording."""

from __future__ import annotations

import atexit
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..engine.api import recording_step
from ..errors import ArgumentError
from ..optim.grad_scaler import has_skipped_all
from ..torch_private import call_before_destruction, mark_stepped, stack_level_of_program
from .obstacles import HostEffects, describe, refusing_seeds
from .recording import PATIENCE, Agreement, Answer, Recorder, Recording, next_number, restorer
from .signature import Arguments, LearningRates, Signature, changed_rates, difference
from .trained import Identity, Trained

P = ParamSpec("P")
R = TypeVar("R")

RECORDING_SECONDS = 600.0  # how long to wait for other ranks to record, because recording may run compilers
SIGNATURES = 64  # how many signatures without a recording are remembered
UNUSED_CALLS = 100  # calls after which an unused recording may be dropped for another signature
WARN_AFTER = 10  # warn if nothing was recorded in WARN_AFTER * `warmup` calls
TRIES = 3  # attempts to record while other ranks are late or cannot record
RATES = 3  # warn after this many new signatures that differ only in learning rates
REFUSALS_TOLD = 64  # for how many calls this rank tells the others that it does not record

_PREVENTED = {
    Answer.LATE: f"did not join a recording within {PATIENCE:.0f} s. Call the step on all ranks, with the same shapes "
    "and settings",
    Answer.REFUSED: "could not record a call",
}
"""Texts for warnings. Each text follows the words "another rank"."""

_alive: weakref.WeakSet[CapturedStep[..., Any]] = weakref.WeakSet()
_told: weakref.WeakSet[Any] = weakref.WeakSet()
"""Default process groups for which `forget_all` is registered to run before their destruction."""


def capture(
    step: Callable[P, R],
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    *,
    scaler: Any = None,
    warmup: int = 3,
    max_graphs: int = 4,
) -> CapturedStep[P, R]:
    """Return a callable that records `step` as a CUDA graph and replays it. The callable takes the arguments of `step`.

    `step` is a training step or part of one, such as forward, loss, backward, clipping, scaler, optimizer and
    `zero_grad`. Tensors among its arguments must be on the GPU. `model` must contain all modules that
    `step` trains, and `optimizer` all optimizers that it steps (one object or a list). `scaler` is its gradient scaler.

    The first `warmup` calls run eagerly, the next call is recorded, and later calls are replays. In a replay, the
    device repeats the step with the current values of parameters, optimizer state, learning rates, scale and arguments,
    and with new random numbers. No Python code of the step runs. Results are valid until the next call.

    There is one recording for each signature, up to `max_graphs` recordings. The signature of a call consists of the
    shapes and dtypes of tensors, the other arguments, train or eval mode, optimizer settings, and whether gradients are
    synchronized.

    Steps that cannot be recorded run eagerly, with a warning that says why. On a CPU, there is no warning.

    Raises:
        ArgumentError: an argument has the wrong type or value.

    Example::

        train_step = unshard.capture(train_step, model, optimizer)
        for batch in batches:
            loss = train_step(batch)
    """
    models: list[Any] = list(model) if isinstance(model, Sequence) else [model]
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    if not callable(step):
        raise ArgumentError(f"capture takes the function of a training step, got {step!r}.")
    if not models or not all(isinstance(each, nn.Module) for each in models):
        raise ArgumentError(f"model must be the module, or a list of the modules, that the step trains, got {model!r}.")
    if not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
        raise ArgumentError(f"optimizer must be a torch.optim.Optimizer or a list of them, got {optimizer!r}.")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentError(f"scaler must be a gradient scaler, such as unshard.optim.GradScaler, got {scaler!r}.")
    for name, number in (("warmup", warmup), ("max_graphs", max_graphs)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ArgumentError(f"{name} must be an integer of at least 1, got {number!r}.")
    return CapturedStep(step, Trained(models, optimizers, scaler), warmup, max_graphs)


class CapturedStep(Generic[P, R]):
    """A step whose calls run eagerly, are recorded, or replay a recording. `unshard.capture` returns it."""

    def __init__(self, step: Callable[P, R], trained: Trained, warmup: int, max_graphs: int):
        update_wrapper(self, step, updated=())
        self._step, self._trained, self._warmup, self._max_graphs = step, trained, warmup, max_graphs
        self._calls = 0
        self._counts: dict[Signature, int] = {}
        self._recorded: dict[Signature, Recording] = {}
        self._refused: dict[Signature, None] = {}
        self._warned: set[str] = set()
        self._identity: Identity | None = None
        self._last_signature: Signature | None = None
        """The signature of the last call. Calls with an equal signature reuse this object, which caches its hash."""
        self._rates: list[LearningRates] = []
        self._recorder: Recorder | None = None
        self._agreement: Agreement | None = None
        self._number = next_number()
        self._answers: Counter[Answer] = Counter()
        """Number of times that the ranks gave each answer, for calls that this rank wanted to record."""
        self._drops = self._refusals_told = 0
        """How often recordings were dropped, and how often this rank told other ranks that it cannot record."""
        self._new_rates = 0
        """Number of signatures since the last recording in which only the learning rates were new."""
        _alive.add(self)

    @property
    def recordings(self) -> int:
        """The number of recorded signatures."""
        return len(self._recorded)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        trained = self._trained
        trained.look()
        device = trained.device
        if device is None or not can_record(device):
            return self._step(*args, **kwargs)
        self._calls += 1
        arguments = Arguments(args, kwargs)
        signature = self._signature(arguments, device)
        if signature is None:
            return self._run(arguments, None)
        recorded = self._recorded.get(signature)
        if recorded is not None and not recorded.can_replay(trained):
            self._wait()
            self._recorded.pop(signature).drop()
            self._counts.pop(signature, None)
            self._drops += 1
            recorded = None
        if recorded is None and self._all_record(signature):
            recorded = self._record(signature, arguments)
        if recorded is None:
            return self._run(arguments, signature)
        recorded.used = self._calls
        result = recorded.replay(arguments.tensors)
        trained.forget_casts()
        if recorded.gradients is not None:
            trained.restore(recorded.gradients)
        for optimizer in trained.optimizers:
            mark_stepped(optimizer)
        return result

    def forget(self) -> None:
        """Drop all recordings and free their memory. The next calls run eagerly, and later calls record again."""
        self._wait()
        self._forget()

    def _forget(self) -> None:
        for recorded in self._recorded.values():
            recorded.drop()
        self._recorded.clear()
        self._refused.clear()
        self._counts.clear()
        self._answers[Answer.LATE] = self._answers[Answer.REFUSED] = self._refusals_told = 0

    def _wait(self) -> None:
        if self._recorded and self._recorder is not None:
            self._recorder.wait()

    # -- run, record or replay -----------------------------------------------------------------------------------

    def _prepare(self, device: torch.device) -> None:
        if self._recorder is None:
            self._trained.release_memory()
            self._recorder = Recorder(device)
            self._rates = [LearningRates(each, device) for each in self._trained.optimizers]
        for rates in self._rates:
            rates.refresh()

    def _signature(self, arguments: Arguments, device: torch.device) -> Signature | None:
        """Drop outdated recordings, and return the signature of the call.

        Return None if the call can be neither recorded nor replayed.
        """
        trained = self._trained
        trained.rest()
        gradients = trained.gradients()
        obstacle = trained.obstacle() or trained.obstacle_in(gradients) or arguments.obstacle(device, trained.is_part)
        if not obstacle or self._recorder is not None:
            self._prepare(device)
        if obstacle:
            self._warn(obstacle)
            return None
        identity = trained.identity()
        if identity != self._identity:
            trained.follow_changes()
            identity = trained.identity()
        if identity != self._identity:
            if self._recorded:
                self._drops += 1
                self.forget()
                if self._drops > TRIES:
                    self._warn("recordings were dropped repeatedly. See 'What takes effect' in the documentation")
            if self._identity is None or identity.model != self._identity.model:
                self._counts.clear()  # units may rebuild buffers, which a recording must not allocate
            self._refused.clear()
            self._answers[Answer.REFUSED] = self._refusals_told = 0
            self._identity = identity
        if obstacle := trained.obstacle_in_buffers():
            self._warn(obstacle)
            return None
        signature = trained.signature(arguments.signature(), gradients)
        if signature != self._last_signature:
            self._last_signature = signature
        return self._last_signature

    def _is_due(self, signature: Signature) -> bool:
        # Recordings that are invalidated repeatedly cost more than they save.
        needed = self._warmup << min(max(0, self._drops - 1), 10)
        if self._counts.get(signature, 0) < needed:
            return False
        if len(self._recorded) < self._max_graphs:
            return True
        oldest = min(self._recorded.values(), key=lambda each: each.used)
        if oldest.used >= self._calls - UNUSED_CALLS:
            self._warn(f"{self._max_graphs} other signatures are recorded and in use (max_graphs)")
            return False
        return True

    def _all_record(self, signature: Signature) -> bool:
        """Return True if all ranks agree to record this call. Their signatures may differ."""
        if self._agreement is None:
            self._agreement = Agreement(self._trained.ranks(), self._number)
        if signature in self._refused:
            if self._refusals_told < REFUSALS_TOLD:  # not in every call, because telling takes time
                self._refusals_told += 1
                self._agreement.refuse(self._calls, "begin")
            return False
        due = self._is_due(signature)
        answer = self._agreement.decide(self._calls, "begin", due)
        if not due:
            return answer is Answer.YES
        self._answers[answer] += 1
        times = self._answers[answer]
        if answer is Answer.NO and times >= WARN_AFTER * self._warmup and not self._recorded:
            self._warn(
                f"other ranks declined to record {times} calls that this rank would have recorded. Use the same shapes "
                "and settings on all ranks"
            )
        if answer in (Answer.LATE, Answer.REFUSED):
            self._counts.pop(signature)  # count again: the other rank may join later
            if times >= TRIES:
                self._refuse(signature, f"{times} times another rank {_PREVENTED[answer]}")
        return answer is Answer.YES

    # -- eager ----------------------------------------------------------------------------------------------

    def _run(self, arguments: Arguments, signature: Signature | None) -> Any:
        """Run the step eagerly. The call counts as warmup if `signature` is not None."""
        if self._recorder is None:
            return arguments.run(self._step)
        if signature is None or signature in self._refused:
            with self._recorder.running():
                return arguments.run(self._step)
        with self._recorder.running(), self._learning_rates():
            effects = HostEffects(self._trained, arguments)
            try:
                result = arguments.run(self._step_to_rest)
            finally:
                effects.stop()
            obstacle = effects.found()
        self._count(signature, obstacle or self._trained.obstacle_after())
        return result

    def _step_to_rest(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, then reshard units that it kept for the next forward. Replays must end with sharded units."""
        awaited = self._trained.awaited()
        result = self._step(*args, **kwargs)
        if self._trained.awaited() <= awaited:
            self._trained.rest_after(result)
        return result

    def _count(self, signature: Signature, obstacle: str) -> None:
        if obstacle:
            self._refuse(signature, obstacle)
            return
        self._trained.keep_gradient_memory()
        if any(map(has_skipped_all, self._trained.optimizers)):
            return  # no optimizer state yet: a recording would create it, and so would every replay
        if signature not in self._counts and self._new_rates < RATES:
            self._count_rates(signature)
        self._counts[signature] = self._counts.pop(signature, 0) + 1
        if len(self._counts) > SIGNATURES:
            del self._counts[next(iter(self._counts))]
        often = self._calls >= WARN_AFTER * self._warmup
        if often and len(self._counts) > 1 and not self._recorded and not self._warned:
            *_, one, other = self._counts
            self._warn(
                f"in {self._calls} calls no signature came more than {max(self._counts.values())} times. The "
                f"last two differ in {difference(one, other)}"
            )

    def _count_rates(self, signature: Signature) -> None:
        """Warn if a learning rate schedule gives every call a new signature."""
        groups = next(filter(None, (changed_rates(signature, each) for each in self._counts)), [])
        self._new_rates += bool(groups)
        if groups and self._new_rates == RATES:
            owners = [type(each).__name__ for each in self._trained.optimizers for _ in each.param_groups]
            name = " and ".join(dict.fromkeys(owners[group] for group in groups))
            self._warn(
                f"in {RATES} calls since the last recording only the learning rate was new, and {name} reads it on the "
                f"host, so every value needs its own recording. Pass fused=True to {name}, and call "
                "unshard.optim.flat(optimizer) if fully_shard has sharded its parameters. If it has no fused=True, "
                "pass the learning rate as a tensor on the GPU, if it takes one"
            )

    def _learning_rates(self, recorded: bool = False) -> ExitStack:
        stack = ExitStack()
        for rates in self._rates:
            stack.enter_context(rates.shown(recorded))
        return stack

    # -- recording ------------------------------------------------------------------------------------------

    def _record(self, signature: Signature, arguments: Arguments) -> Recording | None:
        """Record the call. If any rank cannot record it, return None on all ranks, which then run the step eagerly."""
        assert self._recorder is not None and self._agreement is not None
        trained = self._trained
        while len(self._recorded) >= self._max_graphs:
            oldest = min(self._recorded, key=lambda each: self._recorded[each].used)
            self._recorded.pop(oldest).drop()
        _drop_before_destruction()
        trained.keep_gradient_memory()
        trained.release_memory()
        trained.forget_casts()
        before, tensors = trained.gradients(), trained.tensors()
        restore = restorer(trained, before)
        recording, stopped = None, ""
        try:
            with self._learning_rates(recorded=True), recording_step(), refusing_seeds(trained):
                recording = self._recorder.record(self._step_to_rest, arguments)
            stopped = trained.obstacle_after()
            if not stopped and trained.tensors() != tensors:
                stopped = "it creates or replaces tensors of modules or optimizers, which a replay would not do"
        except Exception as error:
            stopped = describe(error)
        except BaseException:
            restore()
            raise
        finally:
            trained.forget_casts()
        answer = self._agreement.decide(self._calls, "end", not stopped, RECORDING_SECONDS)
        if answer is Answer.YES and recording is not None:
            after = trained.gradients()
            recording.gradients = None if after == before else after
            recording.written = trained.kept_grads()
            self._recorded[signature] = recording
            self._new_rates = 0
            trained.release_memory()
            return recording
        if recording is not None:
            recording.drop()
        restore()
        self._refuse(signature, stopped or "another rank could not record it")
        return None

    def _refuse(self, signature: Signature, reason: str) -> None:
        self._refused[signature] = None
        if len(self._refused) > SIGNATURES:
            del self._refused[next(iter(self._refused))]
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        """Warn once for each kind of reason. Reasons that differ only in shapes or names are of the same kind."""
        kind = re.sub(r"[\d, ()]+|'[^']*'", "", reason)
        if kind not in self._warned:
            self._warned.add(kind)
            name = getattr(self._step, "__qualname__", repr(self._step))
            warnings.warn(f"The step {name} runs without a recording: {reason}.", stacklevel=stack_level_of_program())


def can_record(device: torch.device) -> bool:
    """Return True on a CUDA device, except during another step's recording. That recording then includes this step."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _drop_before_destruction() -> None:
    """Let torch call `forget_all` before it destroys process groups. Otherwise, NCCL would wait for graphs forever."""
    if dist.is_initialized() and dist.group.WORLD not in _told:
        _told.add(dist.group.WORLD)
        call_before_destruction(forget_all)


@atexit.register
def forget_all() -> None:
    """Drop the recordings of all captured steps."""
    for step in list(_alive):
        step._forget()  # without waiting: if another rank failed, a collective may never end
