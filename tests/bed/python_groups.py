"""Process groups written in Python: each has some of the methods that a group may have, and a Gloo backend inside."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor


class PythonGroup(dist.ProcessGroup):
    """What all of them have. Nothing that they inherit works: no backend is registered with them."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.calls = inner, Counter()

    def getBackendName(self) -> str:
        raise NotImplementedError("a group need not tell its backend")

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        self.calls["all_reduce"] += 1
        return self.inner.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.inner.broadcast(tensors, opts)

    def _gather(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        self.calls["gather"] += 1
        return self.inner._allgather_base(output, input, opts)

    def _reduce(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        self.calls["reduce"] += 1
        return self.inner._reduce_scatter_base(output, input, opts)

    def _gather_many(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Returns None, as it waits itself."""
        self.calls["gather many"] += 1
        for output, piece in zip(outputs, inputs, strict=True):
            self.inner._allgather_base(output, piece, opts).wait()

    def _reduce_many(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        self.calls["reduce many"] += 1
        for output, whole in zip(outputs, inputs, strict=True):
            self.inner._reduce_scatter_base(output, whole, opts).wait()


class NewNames(PythonGroup):
    """Of torch 2.13."""

    all_gather_single, reduce_scatter_single = PythonGroup._gather, PythonGroup._reduce

    def all_to_all_single(self, output: Tensor, input: Tensor, splits: Any, input_splits: Any, opts: Any = None) -> Any:
        self.calls["all_to_all"] += 1
        return self.inner.alltoall_base(output, input, splits, input_splits)


class OldNames(PythonGroup):
    """Of torch 2.12."""

    _allgather_base, _reduce_scatter_base = PythonGroup._gather, PythonGroup._reduce


class NewNamesInGroups(NewNames):
    all_gather_single_coalesced = PythonGroup._gather_many
    reduce_scatter_single_coalesced = PythonGroup._reduce_many


class OnlyGroups(PythonGroup):
    """Under their old names, and no methods for one tensor."""

    allgather_into_tensor_coalesced = PythonGroup._gather_many
    reduce_scatter_tensor_coalesced = PythonGroup._reduce_many


class OnlyLists(PythonGroup):
    """One tensor for every rank."""

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        self.calls["gather"] += 1
        return self.inner.allgather(outputs, inputs, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        self.calls["reduce"] += 1
        return self.inner.reduce_scatter(outputs, inputs, opts)


PYTHON_GROUPS = [NewNames, OldNames, NewNamesInGroups, OnlyGroups, OnlyLists]


def make(kind: type[PythonGroup]) -> PythonGroup:
    """A group of all ranks that torch knows, so that a mesh can be made of it."""
    name = f"python-{kind.__name__.lower()}"
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            name,
            lambda store, rank, size, timeout: kind(dist.ProcessGroupGloo(store, rank, size, timeout)),
            devices=["cpu"],
        )
    group = dist.new_group(backend=name)
    assert type(group) is kind
    return group


class LookAlike:
    """An object with a rank and a size, which can send nothing but an all-reduce that does nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allreduce(self, *unused: Any) -> None:
        return None
