"""What the wrapper leaves alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..engine.hooks import state_of
from ..errors import ArgumentError, PolicyError


@dataclass(frozen=True)
class Ignored:
    """Modules with everything inside them, and parameters."""

    given: dict[str, Any] = field(default_factory=dict)
    """The argument that named them, for modules inside."""
    modules: frozenset[nn.Module] = frozenset()
    parameters: frozenset[nn.Parameter] = frozenset()


def resolve_ignored(root: nn.Module, modules: Any, states: Any) -> Ignored:
    """What the arguments `ignored_modules` and `ignored_states` say."""
    if modules is not None and states is not None:
        raise ArgumentError("Pass ignored_states or ignored_modules, not both; the former takes modules too.")
    name, given = ("ignored_modules", modules) if modules is not None else ("ignored_states", states)
    if given is None:
        return Ignored()
    listed = _listed(name, given)
    if name == "ignored_states" and all(isinstance(each, nn.Parameter) for each in listed):
        return Ignored({name: listed}, parameters=frozenset(listed))
    wrong = [each for each in listed if not isinstance(each, nn.Module)]
    if wrong:
        kinds = sorted({type(each).__name__ for each in listed})
        error = ArgumentError if name == "ignored_states" else PolicyError
        expected = "parameters only or modules only" if name == "ignored_states" else "modules"
        raise error(f"{name} takes {expected}, got {', '.join(kinds)}.")
    for each in listed:
        if state_of(each) is not None:
            raise ArgumentError(f"{name} contains a {type(each).__name__} that is wrapped; a unit cannot be ignored.")
        if each is root:
            warnings.warn(
                f"{name} contains the {type(each).__name__} that is to be wrapped: nothing of it will be sharded.",
                stacklevel=4,
            )
    inside = frozenset(child for each in listed for child in each.modules() if state_of(child) is None)
    own = frozenset(parameter for child in inside for parameter in child.parameters(recurse=False))
    return Ignored({name: listed}, inside, own)


def _listed(name: str, given: Any) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise PolicyError(f"{name} must be a list, got {type(given).__name__}.")
    return list(given)
