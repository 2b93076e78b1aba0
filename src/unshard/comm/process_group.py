"""Issues collectives with a `torch.distributed` process group.

The transport calls the methods of the group instead of the functions of `torch.distributed`. The methods accept several
tensors at once and skip a layer of Python.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UnsupportedError
from ..layout.collective_tensors import PACK_SMALL, PackingRule
from ..torch_private import (
    ALL_GATHER,
    ALL_GATHER_COALESCED,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    REDUCE_SCATTER_COALESCED,
    AllgatherOptions,
    AllreduceOptions,
    ReduceScatterOptions,
    backend_name,
    backend_of,
)
from .interface import Done, Label, Tensors, Traits, Transport, Work, Works, WorkThen, joined

# Each tensor in a grouped NCCL collective costs time on the wire: 0.07 ms with 4 ranks on a slow network. Packing costs
# a copy at the speed of the device's memory, 3 us for 4 MiB, and a call on the host.
ON_DEVICE = PackingRule(below=4 * 1024 * 1024, least=3)
ON_HOST = PACK_SMALL

_dtype_of = attrgetter("dtype")
_DONE = Done()  # a group written in Python may return None instead of a work
_TENSOR: Any = dist.reduce_scatter_tensor
_SINGLE: Any = getattr(dist, "reduce_scatter_single", None)  # its name since torch 2.13, which has both

# Dtypes that Gloo's all-gather accepts. Others are sent as uint8.
_GLOO_DTYPES = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    + (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
)

# `wait` blocks the host with these backends, even for tensors on a device. With others it blocks the current stream.
_WAITING_ON_HOST = ("gloo", "mpi", "ucc")


class ProcessGroupTransport(Transport):
    def __init__(self, group: Any, device: torch.device):
        self.rank, self.world = group.rank(), group.size()
        self._group = group
        self.backend = backend_name(group, device)
        if self.backend == "gloo":
            delay_exit()
        in_python = type(group) is not dist.ProcessGroup
        backend = backend_of(group, device) if in_python else group
        gathers_groups, reduces_groups = _grouping(self.backend, in_python)
        gather, self._gather_many, _ = _methods(group, backend, ALL_GATHER, ALL_GATHER_COALESCED, gathers_groups)
        if gather is None and (by_list := _own(group, ("allgather",))):
            gather = _all_gather_by_list(by_list)
        reduce, self._reduce_many, own = _methods(
            group, backend, REDUCE_SCATTER, REDUCE_SCATTER_COALESCED, reduces_groups
        )
        if reduce is None and (by_list := _own(group, ("reduce_scatter",))):
            reduce = _reduce_scatter_by_list(by_list)
        self._gather_one = gather or _missing(group, ALL_GATHER)
        self._reduce_one = reduce or _missing(group, REDUCE_SCATTER)
        self._all_to_all = _own(group, ALL_TO_ALL) or (backend and _method(backend, ALL_TO_ALL))
        all_reduce = _own(group, ("allreduce", "allreduce_coalesced")) or (backend and backend.allreduce)
        self._all_reduce = all_reduce or _missing(group, ("allreduce",))
        # A reduce-scatter that is written in Python is not replaced by an exchange.
        self._exchanges = self._all_to_all is not None and not own and _exchange_is_faster(self.backend, device)
        # NCCL runs the collectives of a group one after the other. In backward, the all-gather of the next unit would
        # wait for the reduce-scatter of the previous one, and both for each other's latencies.
        self.separate_is_faster = self.backend == "nccl" and not in_python
        on_host = device.type == "cpu" and self.backend != "nccl"  # a simulated device is a CPU with NCCL
        self.traits = Traits(
            self._gather_many is not None,
            self._reduce_many is not None and not self._exchanges,  # an exchange takes one tensor
            packing=ON_HOST if on_host or self.backend == "gloo" else ON_DEVICE,
            gathers_on_any_stream=True,
            waits_in_stream=not on_host and self.backend not in _WAITING_ON_HOST,
            # NCCL is slower with pieces that are not multiples of 16 bytes.
            piece_alignment=16 if self.backend == "nccl" else 1,
            reduce_scatter_ignores_timeout=self.backend == "gloo" and not self._exchanges,
            gathers=gather is not None or isinstance(group, dist.ProcessGroup),
        )
        self._gather_options = AllgatherOptions()
        self._sum, self._mean = ReduceScatterOptions(), ReduceScatterOptions()
        self._sum_all, self._mean_all = AllreduceOptions(), AllreduceOptions()
        self._sum.reduceOp = self._sum_all.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        self._mean.reduceOp = self._mean_all.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return torch.uint8 if self.backend == "gloo" and dtype not in _GLOO_DTYPES else dtype

    def all_gather(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None) -> Work:
        options = self._gather_options
        if len(outputs) > 1 and self.traits.gathers_groups:
            return self._gather_many(outputs, inputs, options) or _DONE  # type: ignore[misc]
        if len(outputs) == 1:
            return self._gather_one(outputs[0], inputs[0], options) or _DONE
        return Works([self._gather_one(*pair, options) or _DONE for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None, average: bool) -> Work:
        # A program may replace the function of `torch.distributed` to observe or change reductions, so call it.
        if dist.reduce_scatter_tensor is not _TENSOR or getattr(dist, "reduce_scatter_single", None) is not _SINGLE:
            return self._reduce_by_function(outputs, inputs, average)
        if self._exchanges or list(map(_dtype_of, outputs)) != list(map(_dtype_of, inputs)):
            return self._reduce_each(outputs, inputs, average)
        options = self._mean if average else self._sum
        if len(outputs) > 1 and self.traits.reduces_groups:
            return self._reduce_many(outputs, inputs, options) or _DONE  # type: ignore[misc]
        if len(outputs) == 1:
            return self._reduce_one(outputs[0], inputs[0], options) or _DONE
        return Works([self._reduce_one(*pair, options) or _DONE for pair in zip(outputs, inputs, strict=True)])

    def _reduce_each(self, outputs: Tensors, inputs: Tensors, average: bool) -> Work:
        works, same = [], []
        for output, unreduced in zip(outputs, inputs, strict=True):
            if self._exchanges or output.dtype != unreduced.dtype:
                works.append(self._exchange(output, unreduced, average))
            else:
                same.append((output, unreduced))
        if same:
            works.append(self.reduce_scatter([o for o, _ in same], [i for _, i in same], average=average))
        return joined(works)

    def _reduce_by_function(self, outputs: Tensors, inputs: Tensors, average: bool) -> Work:
        single = getattr(dist, "reduce_scatter_single", None)
        function: Any = single if single is not _SINGLE else dist.reduce_scatter_tensor
        works: list[Work] = []
        for output, unreduced in zip(outputs, inputs, strict=True):
            if output.dtype != unreduced.dtype:
                works.append(self._exchange(output, unreduced, average))
            else:
                function(output, unreduced, group=self._group)
                if average:
                    output.div_(self.world)
        return Works(works)

    def _exchange(self, output: torch.Tensor, unreduced: torch.Tensor, average: bool) -> Work:
        """Reduce-scatter by an all-to-all: each rank receives its pieces in the input's dtype and adds them up."""
        if self._all_to_all is None:
            return self._reduce_copy(output, unreduced, average)
        if self.world == 2 and self._exchanges:
            return self._exchange_pair(self._all_to_all, output, unreduced, average)
        received = torch.empty_like(unreduced)
        work = self._all_to_all(received, unreduced, [], []) or _DONE
        return WorkThen(work, partial(add_up, self._rows(received, output), output, average))

    def _rows(self, pieces: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        # Pieces of a narrow dtype have extra padding at the end. Outputs do not.
        return pieces.view(self.world, -1)[:, : output.numel()]

    def _reduce_copy(self, output: torch.Tensor, unreduced: torch.Tensor, average: bool) -> Work:
        # This group has no all-to-all, so reduce a copy in the dtype of the output.
        copy = self._rows(unreduced, output).to(output.dtype).flatten()
        work = self.reduce_scatter([output], [copy], average=average)
        return WorkThen(work, lambda: copy)  # the copy must live until the wait

    def _exchange_pair(self, all_to_all: Any, output: torch.Tensor, unreduced: torch.Tensor, average: bool) -> Work:
        """Reduce-scatter between two ranks, which exchange one piece each. Equal dtypes need no extra buffer."""
        other, piece = 1 - self.rank, unreduced.numel() // 2
        sent, own = unreduced.narrow(0, other * piece, piece), unreduced.narrow(0, self.rank * piece, piece)
        received = output if output.dtype == unreduced.dtype else torch.empty_like(own)
        splits = [piece, 0] if other == 0 else [0, piece]
        work = all_to_all(received, sent, splits, splits) or _DONE
        return WorkThen(work, partial(_add_pair, own, received, output, average))

    def all_reduce(self, tensors: Tensors, *, label: Label | None = None, average: bool) -> Work:
        options = self._mean_all if average else self._sum_all
        reduce = self._all_reduce
        return joined([reduce([tensor], options) for tensor in tensors])


def _add_pair(own: torch.Tensor, received: torch.Tensor, output: torch.Tensor, average: bool) -> None:
    numel = output.numel()
    if received is not output:
        output.copy_(received[:numel])
    output.add_(own if own.numel() == numel else own[:numel])
    if average:
        output.div_(2)


def add_up(rows: torch.Tensor, output: torch.Tensor, average: bool) -> None:
    """Set `output` to the sum of `rows`, or to their mean if `average`. Up to 16 rows are added in rank order.

    If the elements of `rows` have fewer than 4 bytes, each result is rounded only once.
    """
    if rows.dtype != output.dtype or rows.dtype.itemsize < 4 or rows.shape[0] > 16:
        (torch.mean if average else torch.sum)(rows, 0, dtype=output.dtype, out=output)
        return
    # On a CPU, this is twice as fast as a reduction over three rows. It costs one call per row.
    first, second, *others = rows.unbind()
    torch.add(first, second, out=output)
    for row in others:
        output.add_(row)
    if average:
        output.div_(rows.shape[0])


EXIT_DELAY = 0.05  # seconds


@cache
def delay_exit() -> None:
    """Delay the end of the interpreter a little, to let Gloo's threads finish. Only the first call has an effect.

    A thread that has run a collective frees the collective's tensors a little later, and needs the interpreter to free
    them. If the interpreter is already shutting down, Python up to 3.13 ends the thread by force. C++ then aborts the
    process with "terminate called without an active exception". `destroy_process_group` waits for the thread only if
    the call frees the process group. Since torch 2.13, a device mesh keeps its groups alive after that call.

    A program of 15 lines without this library (a mesh, `all_gather_object`, `destroy_process_group`) aborted in 7 of 50
    runs. With a delay during which other threads can use the interpreter, it aborted in none of 160 runs.
    """
    if sys.version_info < (3, 14):
        atexit.register(time.sleep, EXIT_DELAY)


def _exchange_is_faster(backend: str, device: torch.device) -> bool:
    # Gloo's reduce-scatter is an all-reduce of a copy. For tensors on the host, it sends twice the bytes of an
    # all-to-all and takes about twice the time.
    return backend == "gloo" and device.type == "cpu"


def _grouping(backend: str, in_python: bool) -> tuple[bool, bool]:
    """Return two bools: True if one all-gather can send several tensors, and True if one reduce-scatter can."""
    # Gloo's coalesced all-gather corrupts the heap if two of them are in flight, and corrupts values if dtypes differ
    # (torch 2.13, seen without this library). With CUDA tensors, it crashes. Gloo's coalesced reduce-scatter works,
    # except for groups written in Python (see below).
    return backend == "nccl", backend == "nccl" or (backend == "gloo" and not in_python)


# -- methods of process groups ------------------------------------------------------------------------------
#
# Chosen once per transport. Torch's own groups have all methods. A group written in Python overrides some of them. The
# methods it inherits work only if a backend is registered with the group, and would bypass the overridden ones.
#
# Inherited methods are called on the backend (which has none for several tensors), because the group's own can
# deadlock. Torch holds the GIL while it runs a method that a Python class inherits from `ProcessGroup`. Gloo's thread
# holds the lock of its queue while it frees a tensor, for which it needs the GIL (torch 2.12 and 2.13, seen without
# this library).

Method = Callable[..., Any]


def _methods(
    group: Any, backend: Any, names: tuple[str, ...], coalesced: tuple[str, ...], grouped: bool
) -> tuple[Method | None, Method | None, bool]:
    """Return a method for one tensor, a method for several tensors, and True if the group defines them in Python.

    A method is None if it does not exist. If the group does not define the methods, the method for one tensor comes
    from `backend`. `grouped` is True if the backend accepts several tensors.
    """
    one, many = _own(group, names), _own(group, coalesced)
    if one is not None or many is not None:
        return one or (many and _of_many(many)), many, True
    if backend is None:
        return None, None, False
    return _method(backend, names), _method(group, coalesced) if grouped else None, False


def _method(group: Any, names: tuple[str, ...]) -> Method:
    return next(getattr(group, name) for name in names if hasattr(group, name))


def _own(group: Any, names: tuple[str, ...]) -> Method | None:
    """Return the first method in `names` that the group does not inherit from torch's class, or None."""
    if type(group) is dist.ProcessGroup:
        return None
    for name in names:
        inherited = getattr(type(group), name, None) is getattr(dist.ProcessGroup, name, None)
        if isinstance(group, dist.ProcessGroup) and inherited and name not in getattr(group, "__dict__", ()):
            continue
        if callable(method := getattr(group, name, None)):
            return method
    return None


def _of_many(many: Method) -> Method:
    return lambda output, input, options: many([output], [input], options)


def _all_gather_by_list(method: Method) -> Method:
    return lambda output, input, options: method([list(output.split(input.numel()))], [input], options)


def _reduce_scatter_by_list(method: Method) -> Method:
    return lambda output, input, options: method([output], [list(input.split(output.numel()))], options)


def _missing(group: Any, names: tuple[str, ...]) -> Method:
    """Return a method that calls the inherited method or, if the group has no backend, raises an error.

    The inherited method must be tried, because C++ may override it in a way that Python cannot see.
    """
    inherited = _method(group, names) if isinstance(group, dist.ProcessGroup) else None

    def call(*args: Any) -> Any:
        try:
            if inherited is not None:
                return inherited(*args)
        except RuntimeError as error:
            if "No backend type" not in str(error):
                raise
        raise UnsupportedError(
            f"The process group {group!r} has no method {names[0]}. A group written in Python must have "
            "all_gather_single, reduce_scatter_single and allreduce (for torch before 2.13: _allgather_base, "
            "_reduce_scatter_base and allreduce), or a backend for the device of the tensors."
        )

    return call
