"""The names of the engine that other packages may import. All other names of the engine may change at any time."""

from . import observer, side_stream
from .all_gather import Slicing
from .checks import refuse_shards_of_another_rank, refuse_shared_memory
from .extension import is_extended, refuse_opaque
from .forward_tensors import cast_floats, tensors_in
from .gradient_snapshot import NO_GRADIENTS, GradientSnapshot, keep_gradient_memory, kept_grads
from .hooks import FSDPState, UnshardHandle, state_of
from .memory import memory_of
from .observer import Members, WatchedWork, name_stages
from .optimizer_steps import note_optimizer_step
from .packing import pack_kernel_on
from .param_group import ParamGroup, param_group_of
from .params.flat_sharded import FlatShardedParams
from .params.module_casts import ModuleBuffers, boundary_policy, cast_boundaries, warn_of_rounding
from .params.offload import OffloadPlan, offload_plan_for
from .params.param import (
    ManagedParam,
    ParamLocation,
    attributes_of,
    is_packed,
    load_quant_states,
    location_of,
    set_quant_state,
    unregistered_location_of,
    unsharded_name,
)
from .params.sharded import ShardedParams
from .root import Root
from .rounds import is_trained
from .scope import Scope, refuse_in_scope
from .shard_lookup import (
    GradRange,
    Scalable,
    ShardRange,
    built_too_early,
    cut_flat,
    grad_ranges,
    name_in_flat_unit,
    orders_of,
    replaced_by_shards,
    rest_on_the_host,
    roots_of,
    scalable_gradients,
    shard_ranges_of,
    sharded_grads_of,
)
from .sharded_grad import ShardedGrad, finish_steps, gradient_of, listen, unlisten
from .sharing import lend, refuse_different_units, share, users_of
from .side_stream import (
    CopyStreams,
    StreamEvent,
    has_spare_queues,
    is_recording,
    mps_runs,
    recording_step,
    reduce_stream,
    simulating_device,
    timing_stream,
)
from .states import Dtypes, GradState, Options, ParamState, Phase, Precision, division, dtypes_for
from .uneven_step import StepPlan, UnevenStep, all_gathered
from .unit import ROOT, Unit

__all__ = [
    "NO_GRADIENTS",
    "ROOT",
    "CopyStreams",
    "Dtypes",
    "FSDPState",
    "FlatShardedParams",
    "GradRange",
    "GradState",
    "GradientSnapshot",
    "ManagedParam",
    "Members",
    "ModuleBuffers",
    "OffloadPlan",
    "Options",
    "ParamGroup",
    "ParamLocation",
    "ParamState",
    "Phase",
    "Precision",
    "Root",
    "Scalable",
    "Scope",
    "ShardRange",
    "ShardedGrad",
    "ShardedParams",
    "Slicing",
    "StepPlan",
    "StreamEvent",
    "UnevenStep",
    "Unit",
    "UnshardHandle",
    "WatchedWork",
    "all_gathered",
    "attributes_of",
    "boundary_policy",
    "built_too_early",
    "cast_boundaries",
    "cast_floats",
    "cut_flat",
    "division",
    "dtypes_for",
    "finish_steps",
    "grad_ranges",
    "gradient_of",
    "has_spare_queues",
    "is_extended",
    "is_packed",
    "is_recording",
    "is_trained",
    "keep_gradient_memory",
    "kept_grads",
    "lend",
    "listen",
    "load_quant_states",
    "location_of",
    "memory_of",
    "mps_runs",
    "name_in_flat_unit",
    "name_stages",
    "note_optimizer_step",
    "observer",
    "offload_plan_for",
    "orders_of",
    "pack_kernel_on",
    "param_group_of",
    "recording_step",
    "reduce_stream",
    "refuse_different_units",
    "refuse_in_scope",
    "refuse_opaque",
    "refuse_shards_of_another_rank",
    "refuse_shared_memory",
    "replaced_by_shards",
    "rest_on_the_host",
    "roots_of",
    "scalable_gradients",
    "set_quant_state",
    "shard_ranges_of",
    "sharded_grads_of",
    "share",
    "side_stream",
    "simulating_device",
    "state_of",
    "tensors_in",
    "timing_stream",
    "unlisten",
    "unregistered_location_of",
    "unsharded_name",
    "users_of",
    "warn_of_rounding",
]
