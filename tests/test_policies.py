"""What policies accept, and what they say about the rest."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from unshard import MixedPrecisionPolicy, OffloadPolicy, OptimizerOffloadPolicy
from unshard.errors import PolicyError
from unshard.policies import matches

F32, F16, B16 = torch.float32, torch.float16, torch.bfloat16


def test_a_policy_is_a_frozen_value() -> None:
    """Contract MP-01."""
    policy = MixedPrecisionPolicy(B16, F32, None, False)
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (B16, F32, None)
    assert policy.cast_forward_inputs is False and MixedPrecisionPolicy().cast_forward_inputs is True
    assert policy == MixedPrecisionPolicy(B16, F32, cast_forward_inputs=False) != MixedPrecisionPolicy()
    with pytest.raises(FrozenInstanceError):
        policy.param_dtype = F16  # type: ignore[misc]
    both = [MixedPrecisionPolicy(B16, overrides=given) for given in ({"*norm*": F32}, [("*norm*", F32)])]
    assert both[0] == both[1] and len({*both, policy}) == 2


def test_the_first_override_that_matches_counts() -> None:
    policy = MixedPrecisionPolicy(B16, overrides={"a.*": F32, "*.weight": F16})
    assert policy.for_parameter(["a.weight"]).param_dtype == F32
    assert policy.for_parameter(["b.weight"]).param_dtype == F16
    assert policy.for_parameter(["b.bias", "a.bias"]).param_dtype == F32  # tied: any of its names
    assert policy.for_parameter(["b.bias"]) is policy
    assert policy.for_parameter(["a.weight"]).output_dtype == B16
    assert MixedPrecisionPolicy(overrides=None).overrides == ()


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("router.weight", "*.router.*", True),
        ("mlp.router.weight", "*.router.*", True),
        ("rerouter.weight", "*.router.*", False),
        ("_checkpoint_wrapped_module.norm.weight", "norm.*", True),
        ("norm.weight", "norm*", True),
        ("norm.weight", "weight", False),
    ],
)
def test_patterns(name: str, pattern: str, expected: bool) -> None:
    assert matches(name, pattern) is expected


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype", "wire_dtype", "buffer_dtype"])
def test_dtypes_are_floating_point(field: str) -> None:
    with pytest.raises(PolicyError, match=f"{field} must be a floating-point dtype, got torch.int32"):
        MixedPrecisionPolicy(**{field: torch.int32})
    with pytest.raises(TypeError, match=f"{field} must be a torch.dtype or None, got 'bfloat16'"):
        MixedPrecisionPolicy(**{field: "bfloat16"})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cast_forward_inputs": F32}, "cast_forward_inputs must be True or False"),
        ({"full_precision_in_eval": None}, "full_precision_in_eval must be True or False"),
        ({"reduce_dtype": B16, "wire_dtype": F32}, "wider than torch.bfloat16"),
        ({"wire_dtype": torch.float8_e5m2}, "need scales"),
        ({"keep_buffers": "inv_freq"}, "must be a list of patterns"),
        ({"keep_buffers": [3]}, "takes patterns"),
        ({"overrides": "norm"}, "must map patterns"),
        ({"overrides": {"norm": "float32"}}, r"overrides\['norm'\] must be a torch.dtype"),
        ({"overrides": {"norm": None}}, "got None"),
        ({"overrides": {"norm": torch.int8}}, "floating-point"),
        ({"overrides": {3: F32}}, "takes patterns"),
        ({"overrides": {"norm": MixedPrecisionPolicy(buffer_dtype=B16)}}, "sets buffer_dtype, which only"),
        ({"overrides": {"norm": MixedPrecisionPolicy(overrides={"a": F32})}}, "sets overrides, which only"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        MixedPrecisionPolicy(**wrong)


def test_the_policy_of_optimizer_state() -> None:
    policy = OptimizerOffloadPolicy()
    assert isinstance(policy, OffloadPolicy) and policy.pin_memory is True
    assert policy == OptimizerOffloadPolicy(pin_memory=True) != OptimizerOffloadPolicy(pin_memory=False)
    with pytest.raises(PolicyError, match=r"OptimizerOffloadPolicy\.pin_memory must be True or False, got 'cpu'"):
        OptimizerOffloadPolicy(pin_memory="cpu")  # type: ignore[arg-type]
