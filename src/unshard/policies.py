"""Policies that users pass to `fully_shard`. They are frozen dataclasses, validated on creation."""

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
# Fields of a unit's policy that overrides for some of its parameters cannot set.
_UNIT_ONLY = ("overrides", "buffer_dtype", "keep_buffers", "full_precision_in_eval")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of one unit.

    ``param_dtype``: dtype of the all-gather and of compute; ``reduce_dtype``: dtype of the gradient reduction;
    ``output_dtype``: floating-point outputs of forward are cast to it. ``None`` changes nothing.
    ``cast_forward_inputs``: floating-point inputs of forward are cast to ``param_dtype``. Sharded parameters, sharded
    gradients and optimizer state always keep the original dtype.

    The following fields are off by default; PyTorch's policy of this name does not have them.

    ``wire_dtype``: gradients are sent in this dtype and summed in the reduce dtype. With bf16 compute, fp32 reduction
    and bf16 here, half the bytes are sent without losing precision. (Gradients accumulated over several backwards
    without synchronization are rounded to ``wire_dtype``.)

    ``overrides``: a different dtype for parameters of this unit whose names match a pattern (``{"*norm*":
    torch.float32}``). The first match wins. Names are those of ``named_parameters()`` of the sharded module, and
    ``"*.router.*"`` also matches a top-level ``router``. A module whose parameters all match gets its inputs in that
    dtype and returns outputs in ``param_dtype``. The value may also be a policy: its ``reduce_dtype``,
    ``output_dtype``, ``cast_forward_inputs`` and ``wire_dtype`` then apply, and outputs are not cast without an
    ``output_dtype``.

    ``buffer_dtype``: forward sees floating-point buffers in this dtype, except those whose names match a pattern in
    ``keep_buffers``, those called ``inv_freq``, and those of modules with an override. The buffers themselves keep
    their dtype, but writes in forward are rounded: list running statistics in ``keep_buffers``.

    ``full_precision_in_eval``: in ``eval()`` mode, all-gather and compute in the original dtype, without casts.
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
        """Return the first override that matches one of a parameter's names, else this policy."""
        names = list(names)
        for pattern, policy in cast(tuple[tuple[str, MixedPrecisionPolicy], ...], self.overrides):
            if any(matches(name, pattern) for name in names):
                return policy
        return self

    def keeps_buffer(self, name: str) -> bool:
        return any(matches(name, pattern) for pattern in (*self.keep_buffers, *_ALWAYS_KEPT))

    def dtype_of_gradients(self, original: torch.dtype, compute: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        """Return the dtype of the sharded gradients (`.grad`)."""
        return original

    def dtype_of_sums(self, compute: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients are accumulated without synchronization."""
        return reduce

    def dtype_of_stored_reduction(self, original: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients are reduced after an `eval()` forward with `full_precision_in_eval`."""
        return reduce

    def casts_inputs(self, root: bool, empty: bool) -> bool:
        """Return True if forward casts its inputs. `root`: the unit is the root. `empty`: it has no parameters."""
        return self.cast_forward_inputs

    @property
    def without_casts(self) -> MixedPrecisionPolicy:
        """This policy without casts of parameters, outputs and buffers. The gradient reduction stays the same."""
        return replace(self, param_dtype=None, output_dtype=None, buffer_dtype=None, overrides=())


class DtypeOverride(MixedPrecisionPolicy):
    """An override given as a dtype. Outputs of modules with this override are cast to the unit's `param_dtype`."""


def matches(name: str, pattern: str) -> bool:
    """Return True if `pattern` matches the name of a parameter or buffer, with or without prefixes of wrappers."""
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
    """Says where shards are stored between uses. This base class keeps shards on the device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keeps sharded parameters, gradients and optimizer state in host memory. Compute and collectives use the device.

    ``pin_memory`` keeps them in page-locked memory, which makes copies faster. Without an accelerator there is no such
    memory, and the first unit warns.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        _check_flag("CPUOffloadPolicy.pin_memory", self.pin_memory)


@dataclass(frozen=True)
class OptimizerOffloadPolicy(OffloadPolicy):
    """Keeps the optimizer state in host memory. Parameters and gradients stay on the device.

    A step copies the state of a few parameters at a time to the device and back, and computes on the device with
    identical results. The optimizer must be flat (``unshard.optim.flat``).

    ``pin_memory`` keeps the state in page-locked memory, so that copies overlap with compute. Without an accelerator
    there is no such memory, and the first unit warns.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        _check_flag("OptimizerOffloadPolicy.pin_memory", self.pin_memory)
