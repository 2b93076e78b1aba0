"""Optimizer state that rests on the host while parameters are on the device (`OptimizerOffloadPolicy`).

A step copies the state to the device and back, chunk by chunk:

    upload stream     | chunk 0 | chunk 1 | chunk 2 | chunk 3 |
    compute stream              | step 0  | step 1  | step 2  | step 3  |
    download stream                       | chunk 0 | chunk 1 | chunk 2 | chunk 3 |

So the device holds the state of three chunks at most. The optimizer's own code steps each chunk separately, in groups
that hold nothing else. State that is loaded goes to the host without passing through the device.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..engine.api import CopyStreams, StreamEvent, shard_ranges_of
from ..names import optimizer_parameters
from ..torch_private import local_of, make_dtensor, spec_of
from .flat_segments import FlatSegment

CHUNK_BYTES = 16 * 2**20
"""Segments with no more bytes than this together are one chunk: a call of the optimizer takes as long as its copy."""

Groups = list[dict[str, Any]]


class StateChunk:
    """Segments that are stepped together. Their state is on the host, in `state`, except during their step."""

    def __init__(self, segments: Sequence[FlatSegment], state: MutableMapping[Any, Any]):
        self.segments = segments
        self.copy_streams = _copy_streams_of(segments[0])
        self._state = state
        self._on_device: defaultdict[Any, Any] | None = None
        self._copies: list[StreamEvent] = []

    def upload(self) -> None:
        """Start to copy the state to the device. Counters are not copied."""
        self._on_device = defaultdict(dict)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for segment in self.segments:
            if segment.flat in self._state:
                own = self._on_device[segment.flat] = dict(self._state[segment.flat])
                for key, value in own.items():
                    if segment.is_per_element(value):
                        own[key] = _device_memory(value, segment.flat.device)
                        targets.append(own[key])
                        sources.append(value)
        if targets:
            self._copies.append(self.copy_streams.up.copy(targets, sources))

    def begin_step(self, groups: Groups, others: dict[Any, Any]) -> tuple[Groups, defaultdict[Any, Any]]:
        """Groups and state for the step."""
        self._wait_for_copies()
        assert self._on_device is not None
        self._on_device.update(others)
        for segment in self.segments:
            groups[segment.group]["params"].append(segment.flat)
        return groups, self._on_device

    def download(self) -> None:
        """Start to copy to the host what the step has changed or made."""
        assert self._on_device is not None
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for segment in self.segments:
            if segment.flat in self._on_device:
                before = self._state.get(segment.flat, {})
                after = dict(self._on_device[segment.flat])
                for key, value in after.items():
                    if segment.is_per_element(value):
                        after[key] = _host_memory(segment, before.get(key), value.dtype)
                        targets.append(after[key])
                        sources.append(value)
                self._state[segment.flat] = after
        if targets:
            self._copies.append(self.copy_streams.down.copy(targets, sources))

    def release(self) -> None:
        """Free the device's memory. It is the compute stream's, which therefore waits for the copies first."""
        self._wait_for_copies()
        self._on_device = None

    def _wait_for_copies(self) -> None:
        for event in self._copies:
            event.wait()
        self._copies.clear()


class StateStreamer:
    """The part of one step that is about segments whose state rests on the host."""

    def __init__(self, segments: Sequence[FlatSegment], state: MutableMapping[Any, Any], groups: Groups):
        """`state` also has what the optimizer keeps under keys that are no parameters; `groups` are its own."""
        self._chunks = [StateChunk(each, state) for each in _chunks_of(segments)]
        # Each call of the step gets these as they are now: one that counts its steps in them counts this one once.
        self._options: Groups = []
        self._others: dict[Any, Any] = {}
        if self._chunks:
            self._options = [_copied({**group, "params": []}) for group in groups]
            self._others = _copied({key: each for key, each in state.items() if not isinstance(key, torch.Tensor)})
            self._chunks[0].upload()
        self._stepping: StateChunk | None = None

    def steps(self) -> Iterator[tuple[Groups, defaultdict[Any, Any]]]:
        """Groups and state for one call of the optimizer's step after the other; `close` afterwards."""
        for number, chunk in enumerate(self._chunks):
            if number + 1 < len(self._chunks):
                self._chunks[number + 1].upload()
            groups_and_state = chunk.begin_step([_copied(group) for group in self._options], _copied(self._others))
            self._stepping = chunk
            yield groups_and_state
            self._download()
            if number:
                self._chunks[number - 1].release()

    def _download(self) -> None:
        chunk, self._stepping = self._stepping, None
        if chunk is not None:
            chunk.download()

    def close(self) -> None:
        """Wait until all state is on the host, also if a step has raised."""
        self._download()
        for chunk in self._chunks:
            chunk.release()
        for copy_streams in {chunk.copy_streams for chunk in self._chunks}:
            copy_streams.down.synchronize()  # the host reads and writes state next


def _copy_streams_of(segment: FlatSegment) -> CopyStreams:
    assert segment.state_offload is not None and segment.state_offload.copy_streams is not None
    return segment.state_offload.copy_streams


def _chunks_of(segments: Sequence[FlatSegment]) -> list[list[FlatSegment]]:
    found: list[list[FlatSegment]] = []
    left = 0
    for segment in segments:
        left -= segment.flat.nbytes
        if found and left >= 0 and _copy_streams_of(found[-1][-1]) == _copy_streams_of(segment):
            found[-1].append(segment)
        else:
            found.append([segment])
            left = CHUNK_BYTES - segment.flat.nbytes
    return found


def _device_memory(on_host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory of the compute stream, which the upload stream writes after what is queued there now."""
    return torch.empty_like(on_host, device=device)


def _host_memory(segment: FlatSegment, before: Any, dtype: torch.dtype) -> torch.Tensor:
    """The memory that the state was copied from, or new memory."""
    return before if segment.is_per_element(before) and before.dtype == dtype else segment.new_state(dtype)


def _copied(values: dict[Any, Any]) -> dict[Any, Any]:
    """With copies of all values that can be changed in place."""
    kinds = (torch.Tensor, list, dict, set)
    return {key: copy.deepcopy(value) if isinstance(value, kinds) else value for key, value in values.items()}


# -- loading ----------------------------------------------------------------------------------------------------


class _Hidden:
    """A tensor that torch does not find and therefore does not move to the parameter's device, all state at once."""

    def __init__(self, value: DTensor):
        self.value = value


@contextmanager
def loading_to_host(optimizer: Optimizer) -> Iterator[None]:
    """Around a load. The hooks are the innermost ones, so that hooks of users see the tensors."""
    handles = [
        optimizer.register_load_state_dict_pre_hook(_hide),
        optimizer.register_load_state_dict_post_hook(move_to_host, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hide(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = optimizer_parameters(optimizer)
    offloaded = _state_devices(parameters)
    numbers = {number for number, each in zip(saved, parameters, strict=False) if id(each) in offloaded}
    state = {
        number: {key: _Hidden(value) if _is_offloaded(key, value) else value for key, value in entry.items()}
        if number in numbers
        else entry
        for number, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _is_offloaded(key: Any, value: Any) -> bool:
    return isinstance(value, DTensor) and key != "step"  # counters stay where the optimizer keeps them


@torch.no_grad()
def move_to_host(optimizer: Optimizer) -> None:
    """Move state that has to rest on the host there: what is on the device, and what was hidden from torch's load."""
    parameters = optimizer_parameters(optimizer)
    devices = _state_devices(parameters)
    for parameter in parameters:
        if id(parameter) in devices and parameter in optimizer.state:
            entry = optimizer.state[parameter]
            for key, value in entry.items():
                if isinstance(value, _Hidden) or _is_offloaded(key, value):
                    entry[key] = _moved(devices[id(parameter)], parameter, value)


def _moved(device: torch.device, parameter: torch.Tensor, value: _Hidden | DTensor) -> DTensor:
    dtensor, dtype = value, None
    if isinstance(dtensor, _Hidden):
        # As torch casts what it loads.
        dtensor, dtype = dtensor.value, parameter.dtype if parameter.is_floating_point() else None
    old = local_of(dtensor)
    local = old.to(device, dtype or old.dtype)
    spec = spec_of(dtensor)
    return dtensor if local is old else make_dtensor(local, spec.mesh, spec.placements, dtensor.shape)


def _state_devices(parameters: list[torch.Tensor]) -> dict[int, torch.device]:
    """By the id of the parameter, where its state rests, if not where the parameter is."""
    return {key: each.states.device for key, each in shard_ranges_of(parameters).items() if each.states is not None}
