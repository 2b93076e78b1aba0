"""Policies for `auto_wrap_policy`, and manual wrapping with `wrap`.

A policy selects the modules of a model to wrap as units.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from .errors import ArgumentError, PolicyError, UnsupportedError

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

Kwargs = dict[str, Any]

# -- policies that are functions: (module, recurse, nonwrapped_numel) -> bool --------------------------------------
#
# With `recurse=True` a policy decides whether to look inside the module, then with `recurse=False` whether to wrap it.
# `nonwrapped_numel` is the number of elements in the module that are not in other units.


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every module.

    Example::

        block = FullyShardedDataParallel(Block(), auto_wrap_policy=always_wrap_policy)
    """
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wrap modules for which `lambda_fn` returns True.

    The wrapper passes `module`, `recurse` (whether it asks about inner modules) and `nonwrapped_numel`.

    Example::

        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block))
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy)
    """
    return True if recurse else lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Iterable[type[nn.Module]]
) -> bool:
    """Wrap instances of the classes in `transformer_layer_cls`.

    The wrapper passes `module`, `recurse` (whether it asks about inner modules) and `nonwrapped_numel`.

    Example::

        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy)
    """
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def _module_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, module_classes: Iterable[type[nn.Module]]
) -> bool:
    return transformer_auto_wrap_policy(module, recurse, nonwrapped_numel, module_classes)


def _wrap_module_cls_individually(
    module: nn.Module, module_classes: Iterable[type[nn.Module]], recurse: bool, *args: Any, **kwargs: Any
) -> bool:
    return recurse or isinstance(module, tuple(module_classes))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
) -> bool:
    """Wrap modules with at least `min_num_params` elements that are not in other units, innermost first.

    The policy does not look inside instances of `force_leaf_modules`. This is meant for modules that read parameters of
    inner modules without calling those modules. The policy does not wrap instances of `exclude_wrap_modules`. This is
    meant for modules without a forward. The defaults are attributes of this function.

    The wrapper passes `module`, `recurse` (whether it asks about inner modules) and `nonwrapped_numel`, the elements of
    `module` that are in no other unit.

    Example::

        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=10_000)
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy)
    """
    own: Any = size_based_auto_wrap_policy
    if recurse:
        excluded = own.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    else:
        excluded = own.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(excluded))


size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]
) -> bool:
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


# -- policies that are objects -------------------------------------------------------------------------------------


class _Policy(ABC):
    """Selects the modules of a model to wrap, and the wrapper's arguments for each module."""

    @abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> dict[nn.Module, Kwargs]: ...


class ModuleWrapPolicy(_Policy):
    """Wraps instances of `module_classes`, with the same arguments as the root.

    Raises a `PolicyError` if `module_classes` is no collection of classes.

    Example::

        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]):
        if isinstance(module_classes, type) or not isinstance(module_classes, Iterable):
            raise PolicyError(f"ModuleWrapPolicy takes a set of module classes, got {module_classes!r}.")
        self._module_classes = set(module_classes)
        for each in self._module_classes:
            if not isinstance(each, type):
                raise PolicyError(f"ModuleWrapPolicy takes a set of module classes, found {each!r} in it.")

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> dict[nn.Module, Kwargs]:
        classes = tuple(self._module_classes)
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, classes)
        }

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Act as a policy function that selects the instances of `module_classes`."""
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(sorted(each.__name__ for each in self._module_classes))}}})"


class CustomPolicy(_Policy):
    """Wraps modules for which `lambda_fn` returns True, or a dict of arguments that override those of the root.

    Raises a `PolicyError` if `lambda_fn` is no function.

    Example::

        policy = CustomPolicy(lambda module: isinstance(module, Block))
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy)
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Kwargs]):
        if not callable(lambda_fn):
            raise PolicyError(f"CustomPolicy takes a function of a module, got {lambda_fn!r}.")
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> dict[nn.Module, Kwargs]:
        chosen: dict[nn.Module, Kwargs] = {}
        for name, module in root_module.named_modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, bool | dict):
                raise ArgumentError(
                    "The function of a CustomPolicy must return True, False or a dict of arguments, but returned "
                    f"{answer!r} for {name!r} ({type(module).__name__})."
                )
            if answer:
                chosen[module] = {**root_kwargs, **answer} if isinstance(answer, dict) else dict(root_kwargs)
        return chosen

    def __repr__(self) -> str:
        return f"CustomPolicy({self._lambda_fn!r})"


# -- manual wrapping ----------------------------------------------------------------------------------------------

_enabled: ContextVar[tuple[Callable[..., nn.Module], Kwargs] | None] = ContextVar("unshard_enable_wrap", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """A context in which `wrap(module)` returns `wrapper_cls(module, **wrapper_kwargs)`.

    Outside this context, `wrap` is a no-op. A nested context raises an UnsupportedError.

    Example::

        with enable_wrap(wrapper_cls=FullyShardedDataParallel):
            model.head = wrap(model.head)
    """
    if _enabled.get() is not None:
        raise UnsupportedError("enable_wrap cannot be nested. Leave the first context before entering the second.")
    token = _enabled.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _enabled.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap `module` with the arguments of `enable_wrap`, overridden by `wrap_overrides`.

    Outside `enable_wrap`, return `module`.

    Example::

        with enable_wrap(wrapper_cls=FullyShardedDataParallel):
            model.head = wrap(model.head, use_orig_params=True)
    """
    enabled = _enabled.get()
    if enabled is None:
        return module
    wrapper, kwargs = enabled
    return wrapper(module, **{**kwargs, **wrap_overrides})
