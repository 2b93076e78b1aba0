"""The engine's surface: all that front-ends, optimizers, tools and everything later may import from the engine.

Nothing outside `engine/` imports another module of it; a test asserts that. A name that is not here is free to change.
"""

from . import observer
from .checks.optimizer_steps import note_optimizer_step
from .checks.root_checks import refuse_shared_memory
from .checks.saved_shards import refuse_shards_of_another_rank
from .checks.shared_parameters import refuse_different_units
from .dtype_rules import Dtypes, Precision, cast_floats, dtypes_for
from .gather.all_gather import Slicing
from .gather.extension import is_extended, refuse_opaque
from .gradient_snapshot import NO_GRADIENTS, GradientSnapshot, keep_gradient_memory, kept_grads
from .hooks import FSDPState, UnshardHandle, state_of
from .nested_tensors import tensors_in
from .observer import Members
from .options import Options
from .param_group import ParamGroup, param_group_of
from .params.flat_sharded import FlatShardedParams
from .params.module_casts import ModuleBuffers, boundary_policy, cast_boundaries, warn_of_rounding
from .params.offload import OffloadPlan, offload_plan_for
from .params.param import ManagedParam, ParamLocation, location_of, unregistered_location_of, unsharded_name
from .params.quantized import attributes_of, is_packed, load_quant_states, set_quant_state
from .params.sharded import ShardedParams
from .reduce.reduction import division
from .reduce.sharded_grad import ShardedGrad, finish_steps, gradient_of, listen, unlisten
from .root import Root
from .shard_lookup import (
    GradRange,
    Scalable,
    ShardRange,
    cut_flat,
    grad_ranges,
    lies_flat,
    orders_of,
    replaced_by_shards,
    rest_on_the_host,
    roots_of,
    scalable_gradients,
    shard_ranges_of,
    sharded_grads_of,
)
from .side_stream import CopyStreams, StreamEvent
from .states import GradState, ParamState, Phase
from .step_recording import recording_step
from .trace import name_stages
from .unit import Unit

__all__ = [
    # front-ends: building a unit and driving it
    "ManagedParam",
    "ParamLocation",
    "location_of",
    "unregistered_location_of",
    "is_extended",
    "refuse_opaque",
    "attributes_of",
    "is_packed",
    "load_quant_states",
    "set_quant_state",
    "ParamGroup",
    "param_group_of",
    "refuse_different_units",
    "ShardedParams",
    "FlatShardedParams",
    "refuse_shards_of_another_rank",
    "refuse_shared_memory",
    "Slicing",
    "OffloadPlan",
    "offload_plan_for",
    "Unit",
    "Options",
    "FSDPState",
    "UnshardHandle",
    "name_stages",
    "state_of",
    "Phase",
    "GradState",
    "ParamState",
    "Root",
    "ModuleBuffers",
    "warn_of_rounding",
    "boundary_policy",
    "cast_boundaries",
    "cast_floats",
    "tensors_in",
    # optimizers: where parameters and gradients lie, and when gradients are ready
    "ShardRange",
    "GradRange",
    "shard_ranges_of",
    "grad_ranges",
    "Scalable",
    "scalable_gradients",
    "ShardedGrad",
    "sharded_grads_of",
    "roots_of",
    "orders_of",
    "gradient_of",
    "replaced_by_shards",
    "lies_flat",
    "cut_flat",
    "rest_on_the_host",
    "CopyStreams",
    "StreamEvent",
    "listen",
    "unlisten",
    "finish_steps",
    "note_optimizer_step",
    # captured steps: gradients between two steps
    "recording_step",
    "GradientSnapshot",
    "NO_GRADIENTS",
    "keep_gradient_memory",
    "kept_grads",
    # tools: what is stored, computed and reduced in which dtype
    "Dtypes",
    "Members",
    "Precision",
    "division",
    "dtypes_for",
    "observer",
    "unsharded_name",
]
