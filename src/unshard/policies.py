"""What users pass: frozen, checked when made, so that nobody has to check them again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, cast

import torch

from .errors import PolicyError

_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype", "wire_dtype", "buffer_dtype")
# A table of frequencies that is rounded puts tokens at wrong positions.
_ALWAYS_KEPT = ("*inv_freq*",)
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")
# What only a whole unit can have, not some of its parameters.
_UNIT_ONLY = ("overrides", "buffer_dtype", "keep_buffers", "full_precision_in_eval")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of one unit.

    ``param_dtype``: what parameters are gathered and computed in; ``reduce_dtype``: what gradients are reduced
    in; ``output_dtype``: what floating-point outputs of forward are cast to. ``None`` leaves each as it comes.
    ``cast_forward_inputs`` casts floating-point inputs of forward to ``param_dtype``. Stored parameters,
    gradients and optimizer state keep the original dtype whatever is set here.

    Beyond what PyTorch's policy of this name has, all off by default:

    ``wire_dtype``: what gradients travel in on their way to being added up in the reduce dtype. With bf16 compute,
    fp32 reduction and a bf16 wire nothing is lost, and half the bytes are sent. (Sums of several backwards that did not
    synchronise are rounded to it.)

    ``overrides``: another precision for parameters of this unit whose names match a pattern (``{"*norm*":
    torch.float32}``; the first match counts; names as in ``named_parameters()`` of the module that is sharded, and
    ``"*.router.*"`` matches a ``router`` at the top, too). A module all of whose parameters match gets its inputs in
    that dtype, and returns outputs in ``param_dtype``. Instead of a dtype it may be a policy, whose ``reduce_dtype``,
    ``output_dtype``, ``cast_forward_inputs`` and ``wire_dtype`` then count.

    ``buffer_dtype``: what floating-point buffers are seen in by forward, except those whose names match a pattern in
    ``keep_buffers``, those called ``inv_freq``, and those of modules with an override. Stored buffers keep their dtype,
    but what forward writes to them is rounded: running statistics are better left alone.

    ``full_precision_in_eval``: in ``eval()`` mode gather and compute in the original dtype, and cast nothing else.
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
            if not isinstance(getattr(self, field), bool):
                raise PolicyError(f"MixedPrecisionPolicy.{field} must be True or False, got {getattr(self, field)!r}.")
        if self.wire_dtype is not None and self.wire_dtype.itemsize < 2:
            raise PolicyError(
                f"MixedPrecisionPolicy.wire_dtype is {self.wire_dtype}; gradients do not fit 8 bits without scales of "
                "their own. Use torch.bfloat16."
            )
        sums = self.reduce_dtype or self.param_dtype
        if self.wire_dtype is not None and sums is not None and self.wire_dtype.itemsize > sums.itemsize:
            raise PolicyError(
                f"MixedPrecisionPolicy.wire_dtype is {self.wire_dtype}, wider than {sums}, which gradients are added "
                "up in: more bytes would be sent for nothing. Widen reduce_dtype, or leave wire_dtype None."
            )
        object.__setattr__(self, "keep_buffers", _patterns(self.keep_buffers))
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
            # An explicit reduce dtype counts for all; one that merely follows param_dtype follows this one instead.
            explicit = self.reduce_dtype if self.reduce_dtype != self.param_dtype else None
            return DtypeOverride(value, explicit, self.param_dtype, self.cast_forward_inputs)
        usual = {field.name: field.default for field in fields(MixedPrecisionPolicy)}
        wrong = [name for name in _UNIT_ONLY if getattr(value, name) != usual[name]]
        if wrong:
            raise PolicyError(f"{where} sets {', '.join(wrong)}, which only the policy of a whole unit can have.")
        return value

    def for_parameter(self, names: Iterable[str]) -> MixedPrecisionPolicy:
        """The policy of a parameter that has these names: the first override that matches, else this one."""
        names = list(names)
        for pattern, policy in cast(tuple[tuple[str, MixedPrecisionPolicy], ...], self.overrides):
            if any(matches(name, pattern) for name in names):
                return policy
        return self

    def keeps_buffer(self, name: str) -> bool:
        return any(matches(name, pattern) for pattern in (*self.keep_buffers, *_ALWAYS_KEPT))

    def dtype_of_gradients(self, original: torch.dtype, compute: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        """What gradients rest in."""
        return original

    def dtype_of_sums(self, compute: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        """What gradients are summed up in that are not synchronised."""
        return reduce

    def dtype_of_stored_reduction(self, original: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        """What gradients are reduced in where `full_precision_in_eval` lets the unit compute as it is stored."""
        return reduce

    def casts_inputs(self, root: bool, empty: bool) -> bool:
        """Whether inputs are cast at the door of a unit: the outermost one, one without parameters."""
        return self.cast_forward_inputs

    @property
    def without_casts(self) -> MixedPrecisionPolicy:
        """The same reduction of gradients, but everything is computed in the dtype it is stored in."""
        return replace(self, param_dtype=None, output_dtype=None, buffer_dtype=None, overrides=())


class DtypeOverride(MixedPrecisionPolicy):
    """An override that was given as a dtype: the module's surroundings say what its outputs return to."""


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern means a parameter or buffer. Wrappers inside a name are nothing a user wrote."""
    plain = name
    for wrapper in _WRAPPERS:
        plain = plain.replace(wrapper, "")
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


def _patterns(given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise PolicyError(f"MixedPrecisionPolicy.keep_buffers must be a list of patterns, got {given!r}.")
    return tuple(_pattern("keep_buffers", each) for each in given)


def _pattern(field: str, pattern: Any) -> str:
    if not isinstance(pattern, str) or not pattern:
        raise PolicyError(f'MixedPrecisionPolicy.{field} names things by patterns such as "*norm*", got {pattern!r}.')
    return pattern


@dataclass(frozen=True)
class OffloadPolicy:
    """Where shards rest. This base class leaves them on the device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Parameters, gradients and optimizer state rest on the host; gathers and compute run on the device.

    ``pin_memory`` keeps the shards in page-locked memory, which makes the copies faster; it needs an accelerator.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.pin_memory, bool):
            raise PolicyError(f"CPUOffloadPolicy.pin_memory must be True or False, got {self.pin_memory!r}.")


@dataclass(frozen=True)
class OptimizerOffloadPolicy(OffloadPolicy):
    """Optimizer state alone rests on the host; parameters and gradients stay on the device.

    A step brings the state of a few parameters at a time to the device, while that of those before returns: it runs on
    the device, with the same numbers. The optimizer has to be made flat (``unshard.optim.flat``).

    ``pin_memory`` keeps the state in page-locked memory, without which steps wait for each copy; it needs an
    accelerator.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.pin_memory, bool):
            raise PolicyError(f"OptimizerOffloadPolicy.pin_memory must be True or False, got {self.pin_memory!r}.")
