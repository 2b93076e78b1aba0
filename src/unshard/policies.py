"""Policies that users pass to `fully_shard`. These are frozen dataclasses, which check their values on creation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, cast

import torch

from .errors import PolicyError
from .names import ALL_PREFIXES, clean_tensor_name

_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype", "wire_dtype", "buffer_dtype")
# Rounding the frequencies of rotary embeddings gives wrong positions.
_ALWAYS_KEPT = ("*inv_freq*",)
# Fields that only the policy of a unit can set, and overrides for some of its parameters cannot.
_UNIT_ONLY = ("overrides", "buffer_dtype", "keep_buffers", "full_precision_in_eval")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes in which a unit computes and communicates.

    Sharded parameters, sharded gradients and optimizer state always keep the original dtype. A field that is ``None``
    changes nothing.

    ``param_dtype`` is the dtype of the all-gather and of compute. ``reduce_dtype`` is the dtype of the gradient
    reduction. Floating-point outputs of forward are cast to ``output_dtype``. If ``cast_forward_inputs`` is True,
    floating-point inputs of forward are cast to ``param_dtype``.

    The following fields are off by default. PyTorch's policy of the same name does not have them.

    ``wire_dtype`` is the dtype in which gradients are sent. They are still summed in the reduce dtype. For example,
    with bf16 compute, fp32 reduction and a ``wire_dtype`` of bf16, half the bytes are sent without losing precision.
    However, gradients that are accumulated over several backwards without synchronization are rounded to
    ``wire_dtype``.

    ``overrides`` sets a different dtype for parameters of this unit whose names match a pattern, for example
    ``{"*norm*": torch.float32}``. The first match wins. Names are those of ``named_parameters()`` of the sharded
    module, and ``"*.router.*"`` also matches a top-level ``router``. If all parameters of a module match, its
    inputs are cast to that dtype, and its outputs to ``param_dtype``. The value may also be a policy. In this case, its
    ``reduce_dtype``, ``output_dtype``, ``cast_forward_inputs`` and ``wire_dtype`` apply as well, and outputs are cast
    only if it sets ``output_dtype``.

    ``buffer_dtype`` is the dtype in which forward sees floating-point buffers. It does not apply to buffers whose names
    match a pattern in ``keep_buffers``, to buffers called ``inv_freq``, or to buffers of modules with an override. The
    buffers themselves keep their dtype, but values that forward writes to them are rounded. List running statistics in
    ``keep_buffers`` to avoid this.

    If ``full_precision_in_eval`` is True, all-gather and compute use the original dtype in ``eval()`` mode, without
    casts.

    Raises a `PolicyError` if a field has an invalid value.

    Example::

        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, overrides={"*norm*": torch.float32})
        fully_shard(model, mp_policy=policy)
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    wire_dtype: torch.dtype | None = None
    overrides: Mapping[str, torch.dtype | MixedPrecisionPolicy] | Iterable[tuple[str, Any]] = ()
    buffer_dtype: torch.dtype | None = None
    keep_buffers: Sequence[str] = ()
    full_precision_in_eval: bool = False

    def __post_init__(self) -> None:
        for field in _DTYPES:
            _check_dtype(f"MixedPrecisionPolicy.{field}", getattr(self, field))
        for field in ("cast_forward_inputs", "full_precision_in_eval"):
            _check_flag(f"MixedPrecisionPolicy.{field}", getattr(self, field))
        if self.wire_dtype is not None and self.wire_dtype.itemsize < 2:
            raise PolicyError(
                f"MixedPrecisionPolicy.wire_dtype is {self.wire_dtype}; gradients in 8 bits need scales, which are "
                "not supported. Use torch.bfloat16."
            )
        sums = self.reduce_dtype or self.param_dtype
        if self.wire_dtype is not None and sums is not None and self.wire_dtype.itemsize > sums.itemsize:
            raise PolicyError(
                f"MixedPrecisionPolicy.wire_dtype is {self.wire_dtype}, wider than {sums}, in which gradients "
                "are summed. Widen reduce_dtype, or leave wire_dtype None."
            )
        kept = self.keep_buffers
        if isinstance(kept, str) or not isinstance(kept, Iterable):
            raise PolicyError(f"MixedPrecisionPolicy.keep_buffers must be a list of patterns, got {kept!r}.")
        object.__setattr__(self, "keep_buffers", tuple(_pattern("keep_buffers", each) for each in kept))
        object.__setattr__(self, "overrides", self._checked_overrides())

    def _checked_overrides(self) -> tuple[tuple[str, MixedPrecisionPolicy], ...]:
        given = () if self.overrides is None else self.overrides
        try:
            pairs = [(pattern, value) for pattern, value in (given.items() if isinstance(given, Mapping) else given)]
        except (TypeError, ValueError):
            raise PolicyError(
                f"MixedPrecisionPolicy.overrides must map patterns of names to dtypes or policies, got {given!r}."
            ) from None
        return tuple((_pattern("overrides", pattern), self._override(pattern, value)) for pattern, value in pairs)

    def _override(self, pattern: str, value: Any) -> MixedPrecisionPolicy:
        where = f"MixedPrecisionPolicy.overrides[{pattern!r}]"
        if not isinstance(value, MixedPrecisionPolicy):
            if value is None:
                raise PolicyError(f"{where} must be a torch.dtype or a MixedPrecisionPolicy, got None.")
            _check_dtype(where, value)
            # A reduce dtype that differs from param_dtype applies to all parameters; an equal one means "as computed".
            explicit = self.reduce_dtype if self.reduce_dtype != self.param_dtype else None
            return DtypeOverride(value, explicit, self.param_dtype, self.cast_forward_inputs)
        usual = {field.name: field.default for field in fields(MixedPrecisionPolicy)}
        wrong = [name for name in _UNIT_ONLY if getattr(value, name) != usual[name]]
        if wrong:
            raise PolicyError(f"{where} sets {', '.join(wrong)}, which only the policy of the unit can set.")
        return value

    def for_parameter(self, names: Iterable[str]) -> MixedPrecisionPolicy:
        """Return the first override that matches one of the names of a parameter, or this policy if none matches."""
        names = list(names)
        for pattern, policy in cast(tuple[tuple[str, MixedPrecisionPolicy], ...], self.overrides):
            if any(matches(name, pattern) for name in names):
                return policy
        return self

    def keeps_buffer(self, name: str) -> bool:
        """Return True if `buffer_dtype` does not apply to the buffer `name`."""
        return any(matches(name, pattern) for pattern in (*self.keep_buffers, *_ALWAYS_KEPT))

    def dtype_of_gradients(self, original: torch.dtype, compute: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        """Return the dtype of the sharded gradients (`.grad`) of a parameter with dtype `original`.

        Gradients have dtype `compute` before their reduction, and `reduce` in it.
        """
        return original

    def dtype_of_sums(self, compute: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        """Return the dtype in which backwards without synchronization accumulate gradients: `compute` or `reduce`."""
        return reduce

    def dtype_of_stored_reduction(self, original: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients are reduced after an `eval()` forward with `full_precision_in_eval`.

        `original` is the dtype of the parameter, and `reduce` that of other reductions.
        """
        return reduce

    def casts_inputs(self, root: bool, empty: bool) -> bool:
        """Return True if forward casts its inputs.

        `root` is True for the root unit, and `empty` is True for a unit without parameters.
        """
        return self.cast_forward_inputs

    @property
    def without_casts(self) -> MixedPrecisionPolicy:
        """This policy without casts of parameters, outputs and buffers. The gradient reduction stays the same."""
        return replace(self, param_dtype=None, output_dtype=None, buffer_dtype=None, overrides=())


class DtypeOverride(MixedPrecisionPolicy):
    """An override that was passed as a dtype. Outputs of modules with it are cast to the unit's `param_dtype`."""


def matches(name: str, pattern: str) -> bool:
    """Return True if `pattern` matches the name of a parameter or buffer, with or without wrapper prefixes."""
    plain = clean_tensor_name(name, ALL_PREFIXES)
    return any(fnmatchcase(each, pattern) for each in (name, plain, f".{plain}"))


def _check_dtype(where: str, dtype: Any) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise PolicyError(f"{where} must be a torch.dtype or None, got {dtype!r}.")
    if not dtype.is_floating_point:
        raise PolicyError(
            f"{where} must be a floating-point dtype, got {dtype}. Integer parameters are never cast; leave the field "
            "None."
        )


def _check_flag(where: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise PolicyError(f"{where} must be True or False, got {value!r}.")


def _pattern(field: str, pattern: Any) -> str:
    if not isinstance(pattern, str) or not pattern:
        raise PolicyError(f'MixedPrecisionPolicy.{field} takes patterns of names such as "*norm*", got {pattern!r}.')
    return pattern


@dataclass(frozen=True)
class OffloadPolicy:
    """Says where parameters, gradients and optimizer state are stored. This base class keeps them on the device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keeps sharded parameters, gradients and optimizer state in host memory. Compute and collectives use the device.

    If ``pin_memory`` is True, the host memory is page-locked, which makes copies faster. Without an accelerator,
    page-locked memory is not available, and the first unit emits a warning.

    Raises a `PolicyError` if ``pin_memory`` is no bool.

    Example::

        fully_shard(model, offload_policy=CPUOffloadPolicy())
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        _check_flag("CPUOffloadPolicy.pin_memory", self.pin_memory)


@dataclass(frozen=True)
class OptimizerOffloadPolicy(OffloadPolicy):
    """Keeps the optimizer state in host memory. Parameters and gradients stay on the device.

    A step copies the state of a few parameters at a time to the device and back. It computes on the device, with the
    same results as without offloading. The optimizer must be flat (``unshard.optim.flat``).

    If ``pin_memory`` is True, the host memory is page-locked, so that copies overlap with compute. Without an
    accelerator, page-locked memory is not available, and the first unit emits a warning.

    Raises a `PolicyError` if ``pin_memory`` is no bool.

    Example::

        fully_shard(model, offload_policy=OptimizerOffloadPolicy())
        optimizer = unshard.optim.flat(torch.optim.AdamW(model.parameters(), fused=True))
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        _check_flag("OptimizerOffloadPolicy.pin_memory", self.pin_memory)
