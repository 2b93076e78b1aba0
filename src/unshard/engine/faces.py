"""What a module's attribute holds: the sharded face at rest, the full face while computing."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_not, setitem
from typing import Any

import torch
from torch import nn

from ..layout.flat import FlatCut
from ..layout.rows import Cut
from ..policies import MixedPrecisionPolicy
from ..torch_private import DTensorSpec, foreach_copy, own_parameters, put_in_weights

_trainable: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")  # no Python function: called in every step


@dataclass(frozen=True)
class Home:
    """One name under which a parameter is registered. Holds no strong reference to the module."""

    module: weakref.ref[nn.Module]
    parameters: dict[str, Any]
    name: str

    @property
    def plain(self) -> bool:
        """Whether writing into the dict of parameters is enough.

        Recurrent layers keep their weights in a list as well and update it in `__setattr__`.
        """
        module = self.module()
        return module is None or type(module).__setattr__ is nn.Module.__setattr__

    def put(self, parameter: nn.Parameter) -> None:
        module = self.module()
        if self.plain or module is None:
            self.parameters[self.name] = parameter
        else:
            setattr(module, self.name, parameter)


def home_of(module: nn.Module, name: str) -> Home:
    return Home(weakref.ref(module), own_parameters(module), name)


class HiddenHome(Home):
    """A name that a module finds its parameter under, although it is not registered there."""

    def put(self, parameter: nn.Parameter) -> None:
        self.parameters[self.name] = parameter
        module = self.module()
        if module is not None and not self.plain:
            put_in_weights(module, self.name, parameter)


def hidden_home_of(module: nn.Module, name: str) -> Home:
    return HiddenHome(weakref.ref(module), module.__dict__, name)


@dataclass(eq=False)
class Slot:
    """One parameter of a unit: its names, how it is cut, and its faces.

    `local` is the piece of the master shard that the sharded face was last given: a face that holds another
    tensor was rebound from outside. `anchor` is the full face's place in the full buffer; `whole_spec` is how the full
    face is distributed over ranks that do not shard it (tensor parallelism), if it is. `origin` tells whether two units
    were given the same parameter.
    """

    name: str
    homes: list[Home]
    cut: Cut | FlatCut
    origin: weakref.ref[nn.Parameter]
    sharded: nn.Parameter
    local: torch.Tensor
    policy: MixedPrecisionPolicy
    whole_spec: DTensorSpec | None = None
    partial_dims: frozenset[int] = frozenset()
    """Dimensions of that distribution over which the reduction itself sums: the gradient may come unsummed there."""
    full: nn.Parameter | None = None
    sliced: nn.Parameter | None = None
    anchor: torch.Tensor | None = None

    @property
    def is_replaced(self) -> bool:
        """Whether a program has put another parameter in its place, which is adopted before the next gather."""
        faces = (self.sharded, self.full, self.sliced)
        return any(all(home.parameters.get(home.name) is not face for face in faces) for home in self.homes)


def mark_full(parameter: nn.Parameter, name: str) -> None:
    """Let a full face be known as one wherever it turns up."""
    parameter.unshard_full_face_of = name  # type: ignore[attr-defined]


def full_name(parameter: Any) -> str | None:
    """The name of the parameter that this is the full face of, if it is one."""
    return getattr(parameter, "unshard_full_face_of", None)


class Faces:
    """Swaps the faces of a unit by assignment, from lists made once."""

    def __init__(self, slots: Iterable[Slot]):
        self._slots = list(slots)
        homes = [(home, slot) for slot in self._slots for home in slot.homes]
        plain = [(home, slot) for home, slot in homes if home.plain]
        self._dicts, self._names = [home.parameters for home, _ in plain], [home.name for home, _ in plain]
        self._plain = [slot for _, slot in plain]
        self._special = [(home, slot) for home, slot in homes if not home.plain]
        self._chunks = Chunks(slot for _, slot in self._special)
        self.refresh()

    def refresh(self) -> None:
        """To be called when the slots were given other faces. `full` are those of all slots, once all have one."""
        full = [slot.full for slot in self._slots if slot.full is not None]
        self.full = full if len(full) == len(self._slots) else []
        self._at_rest = [slot.sharded for slot in self._slots]
        self._full, self._sharded = [slot.full for slot in self._plain], [slot.sharded for slot in self._plain]

    def follow_freezing(self) -> None:
        """Users freeze and unfreeze the parameters they see at rest."""
        if any(map(is_not, map(_trainable, self.full), map(_trainable, self._at_rest))):
            for full, at_rest in zip(self.full, self._at_rest, strict=True):
                full.requires_grad_(at_rest.requires_grad)

    def show_full(self) -> None:
        self._put(self._full)
        if self._special:
            self._chunks.fill()
            for home, slot in self._special:
                assert slot.full is not None
                home.put(slot.full)

    def _put(self, faces: Sequence[nn.Parameter | None]) -> None:
        deque(map(setitem, self._dicts, self._names, faces), maxlen=0)  # a loop in C

    def show_sharded(self) -> None:
        self._put(self._sharded)
        if self._special:
            self._chunks.empty()
            for home, slot in self._special:
                home.put(slot.sharded)

    def show_sliced(self) -> None:
        for slot in self._slots:
            assert slot.sliced is not None
            slot.sliced.requires_grad_(slot.sharded.requires_grad)
        self._put([slot.sliced for slot in self._plain])
        if self._special:
            self._chunks.empty()
            for home, slot in self._special:
                assert slot.sliced is not None
                home.put(slot.sliced)


class Chunks:
    """Memory that recurrent layers keep their full faces in.

    On a GPU such a layer moves weights it has not seen before into one chunk, in cuDNN's order. Later gathers would
    fill memory that nobody reads, and the layer would silently compute with the weights of the first step. So what is
    gathered is copied into the chunk, and the chunk is emptied with the full buffer.
    """

    def __init__(self, slots: Iterable[Slot]):
        self._slots = list(slots)
        self._filled = False
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []

    def fill(self) -> None:
        self._filled = True
        for storage, nbytes in self._emptied:
            storage.resize_(nbytes)
        self._emptied = []
        moved = self._moved()
        if moved:
            foreach_copy([full.data for full, _ in moved], [anchor for _, anchor in moved])

    def empty(self) -> None:
        if not self._filled:
            return
        self._filled = False
        storages = {full.untyped_storage().data_ptr(): full.untyped_storage() for full, _ in self._moved()}
        self._emptied = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage in storages.values():
            storage.resize_(0)

    def _moved(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Full faces that no longer lie at their places; only while the full buffer is held."""
        pairs = [(slot.full, slot.anchor) for slot in self._slots]
        return [(f, a) for f, a in pairs if f is not None and a is not None and f.data_ptr() != a.data_ptr()]
