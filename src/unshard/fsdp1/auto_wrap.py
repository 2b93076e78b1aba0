"""Wraps the modules that an `auto_wrap_policy` chooses, innermost modules first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..engine.api import cast_floats, tensors_in
from ..errors import ArgumentError, PolicyError, listed
from ..torch_private import own_modules, stack_level_of_program
from ..wrap import Kwargs, _Policy

Policy = _Policy | Callable[..., bool]


def auto_wrap(
    module: nn.Module,
    policy: Policy,
    wrapper: Callable[..., nn.Module],
    kwargs: Kwargs,
    ignored_modules: AbstractSet[nn.Module] = frozenset(),
    ignored_params: AbstractSet[nn.Parameter] = frozenset(),
) -> None:
    """Wrap the modules inside `module` that `policy` chooses. `module` itself is not wrapped.

    Each chosen module is replaced with `wrapper(chosen_module, **kwargs)`. `mixed_precision` in `kwargs` may list
    classes to ignore, by default batch norms. Instances of these classes are wrapped separately, without mixed
    precision. `ignored_modules` must also contain the modules inside ignored modules. A module with several names is
    wrapped once, and replaced under all of its names.
    """
    if isinstance(policy, type):
        name = policy.__name__
        hint = f"To wrap the modules of that class, pass ModuleWrapPolicy({{{name}}})."
        if issubclass(policy, _Policy):
            hint = f"Pass an instance of it: {name}(...)."
        raise PolicyError(f"auto_wrap_policy must be a function or a policy, got the class {name}. {hint}")
    _check_unwrapped(module, wrapper)
    mixed_precision = kwargs.get("mixed_precision")
    classes = tuple(getattr(mixed_precision, "_module_classes_to_ignore", None) or ())
    full_precision = {
        each for each in module.modules() if each not in ignored_modules and isinstance(each, classes)
    } - {module}
    if isinstance(policy, _Policy):
        chosen = policy._run_policy(module, set(ignored_modules), dict(kwargs))
    elif callable(policy):
        choice = _Choice(module, policy, ignored_modules, ignored_params, full_precision)
        choice.visit(module)
        chosen = {target: dict(kwargs) for target in choice.chosen}
    else:
        raise PolicyError(
            f"auto_wrap_policy must be a function or a policy such as ModuleWrapPolicy, got {policy!r}. For a set of "
            "classes, pass ModuleWrapPolicy(classes)."
        )
    for each in full_precision:
        chosen[each] = {**chosen.get(each, kwargs), "mixed_precision": None}
        _cast_at_boundary(each)
    if full_precision:
        names = ", ".join(sorted({type(each).__name__ for each in full_precision}))
        warnings.warn(
            f"With mixed precision, modules of these classes are wrapped by themselves and compute in full precision: "
            f"{names}. To change that, pass MixedPrecision(_module_classes_to_ignore=...).",
            stacklevel=stack_level_of_program(),
        )
    chosen.pop(module, None)
    if isinstance(policy, _Policy):
        _check_frozen(module, chosen, ignored_params, kwargs.get("use_orig_params", False))
    replace_modules(module, lambda each: wrapper(each, **chosen[each]) if each in chosen else None)


def replace_modules(
    root: nn.Module,
    fn: Callable[[nn.Module], nn.Module | None],
    results: dict[nn.Module, nn.Module] | None = None,
) -> None:
    """Call `fn` on each module inside `root`, children first. If `fn` returns a module, replace the original with it.

    `fn` is called once per module. A module with several names is replaced under all of them. `results` is for the
    recursive calls only. It is not a variable of a nested function, because a recursive function that is nested refers
    to itself, and this reference cycle would keep the modules alive.
    """
    results = {} if results is None else results
    results[root] = root  # ends the recursion if modules contain each other
    for name, child in list(own_modules(root).items()):
        if child is None:
            continue
        if child not in results:
            replace_modules(child, fn, results)
            results[child] = fn(child) or child
        if results[child] is not child:
            setattr(root, name, results[child])


@dataclass
class _Choice:
    """Asks a policy function which modules to wrap. Modules in `full_precision` are always separate units.

    This is a class because a recursive closure would be a reference cycle that keeps the modules alive.
    """

    root: nn.Module
    policy: Callable[..., bool]
    ignored_modules: AbstractSet[nn.Module]
    ignored_params: AbstractSet[nn.Parameter]
    full_precision: AbstractSet[nn.Module] = frozenset()
    with_root: bool = False
    chosen: list[nn.Module] = field(default_factory=list)
    """Modules to wrap, children first."""
    wrapped: dict[nn.Module, int] = field(default_factory=dict)

    def _numel(self, module: nn.Module) -> int:
        return sum(each.numel() for each in module.parameters() if each not in self.ignored_params)

    def visit(self, module: nn.Module) -> int:
        """Choose from `module` and its submodules. Return the number of parameter elements in chosen modules."""
        wrapped = self.wrapped
        if module in wrapped:
            return wrapped[module]
        wrapped[module] = 0
        everything = self._numel(module)
        if self.policy(module=module, recurse=True, nonwrapped_numel=everything):
            children = [child for child in module.children() if child not in self.ignored_modules]
            wrapped[module] = sum([self.visit(child) for child in children])
            allowed = module is not self.root or self.with_root
            unwrapped = everything - wrapped[module]
            if allowed and self.policy(module=module, recurse=False, nonwrapped_numel=unwrapped):
                self.chosen.append(module)
                wrapped[module] = everything
        else:
            wrapped[module] = sum(self._numel(each) for each in module.modules() if each in self.full_precision)
        if module in self.full_precision:
            wrapped[module] = everything
        return wrapped[module]


def _cast_at_boundary(module: nn.Module) -> None:
    """Add hooks that cast inputs of `module` to its parameters' dtype, and its outputs back to the inputs' dtype."""
    input_dtype: torch.dtype | None = None

    def cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal input_dtype
        own = next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)
        input_dtype = None
        for tensor in tensors_in((args, kwargs)):
            if tensor.is_floating_point() and tensor.dtype != own:
                input_dtype = tensor.dtype
        return cast_floats((args, kwargs), own)

    module.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    module.register_forward_hook(lambda module, args, output: cast_floats(output, input_dtype))


# -- checks --------------------------------------------------------------------------------------------------------


def _check_unwrapped(root: nn.Module, wrapper: Callable[..., nn.Module]) -> None:
    for name, each in root.named_modules():
        if isinstance(wrapper, type) and isinstance(each, wrapper):
            raise ArgumentError(
                f"auto_wrap_policy wraps the modules inside {type(root).__name__}, but {name or 'it'!r} is wrapped "
                "already. Wrap by hand or by policy, not both."
            )


def _check_frozen(
    root: nn.Module,
    chosen: Collection[nn.Module],
    ignored: AbstractSet[nn.Parameter],
    use_orig_params: bool,
) -> None:
    taken: set[nn.Parameter] = set(ignored)
    names = {module: name for name, module in root.named_modules()}
    for module in reversed([each for each in root.modules() if each in chosen]):  # inner modules come first
        own = {name: each for name, each in module.named_parameters() if each not in taken}
        taken.update(own.values())
        frozen = [name for name, each in own.items() if not each.requires_grad]
        if not frozen or len(frozen) == len(own):
            continue
        trained = [name for name in own if name not in frozen]
        found = (
            f"{names[module]!r} ({type(module).__name__}) becomes one unit, but has frozen parameters "
            f"({listed(frozen)}) and others ({listed(trained)})"
        )
        if not use_orig_params:
            raise ArgumentError(
                f"{found}. Wrap them separately, pass use_orig_params=True, or freeze after wrapping all or none."
            )
        numel = sum(each.numel() for each in own.values())
        needed = sum(own[name].numel() for name in trained)
        warnings.warn(
            f"{found}: its gradient takes memory for {numel} elements instead of {needed}. Wrap them separately.",
            stacklevel=stack_level_of_program(),
        )


# -- functions of PyTorch's `wrap` module that activation checkpointing and other libraries call --------------------


def _recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: AbstractSet[nn.Module],
    ignored_params: AbstractSet[nn.Parameter],
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """Wrap the modules that the policy chooses. With `only_wrap_children`, `module` itself is not wrapped.

    Return `module` or its wrapper, and the number of parameter elements in wrapped modules.
    """
    _check_unwrapped(module, wrapper_cls)
    choice = _Choice(module, auto_wrap_policy, ignored_modules, ignored_params, with_root=not only_wrap_children)
    numel = choice.visit(module)
    replace_modules(module, lambda each: wrapper_cls(each, **kwargs) if each in choice.chosen else None)
    return (wrapper_cls(module, **kwargs) if module in choice.chosen else module), numel


def _construct_wrap_fn(
    root_module: nn.Module, target_module_to_kwargs: dict[nn.Module, Kwargs], fsdp_fn: Callable[..., nn.Module]
) -> Callable[[nn.Module], nn.Module | None]:
    def fn(module: nn.Module) -> nn.Module | None:
        if module in target_module_to_kwargs and module is not root_module:
            return fsdp_fn(module, **target_module_to_kwargs[module])
        return None

    return fn


_post_order_apply = replace_modules
