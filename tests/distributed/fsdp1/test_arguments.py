"""The constructor of `FullyShardedDataParallel`: arguments, defaults, refusals (contract C2, C3)."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.wrapped import full_parameters, wrap
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import unshard
from unshard import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from unshard import FullyShardedDataParallel as FSDP
from unshard.wrap import CustomPolicy, ModuleWrapPolicy, always_wrap_policy

S = ShardingStrategy
quiet = pytest.mark.filterwarnings("ignore")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 2))


def test_f1_04_to_f1_12_enums_and_configs_are_those_of_the_peer() -> None:
    import torch.distributed.fsdp as peer

    for name in ("ShardingStrategy", "BackwardPrefetch", "StateDictType", "OptimStateKeyType"):
        ours, theirs = getattr(unshard, name), getattr(peer, name)
        assert [(each.name, each.value) for each in ours] == [(each.name, each.value) for each in theirs]
    for name in [
        "MixedPrecision",
        "CPUOffload",
        "StateDictConfig",
        "FullStateDictConfig",
        "LocalStateDictConfig",
        "ShardedStateDictConfig",
        "OptimStateDictConfig",
        "FullOptimStateDictConfig",
        "LocalOptimStateDictConfig",
        "ShardedOptimStateDictConfig",
        "StateDictSettings",
    ]:
        ours, theirs = getattr(unshard, name), getattr(peer, name)
        assert [(f.name, f.default) for f in dataclasses.fields(ours)] == [
            (f.name, f.default) for f in dataclasses.fields(theirs)
        ]
        assert [c.__name__ for c in ours.__mro__] == [c.__name__ for c in theirs.__mro__]
    assert MixedPrecision() == MixedPrecision()
    changed = MixedPrecision()
    changed.param_dtype = torch.float16  # F1-06: mutable
    assert changed != MixedPrecision()


def test_f1_13_to_f1_28_arguments_are_those_of_the_peer() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as Peer

    ours, theirs = (inspect.signature(each.__init__).parameters.values() for each in (FSDP, Peer))
    assert [each.name for each in ours] == [each.name for each in theirs]
    assert [str(each.default) for each in ours] == [str(each.default) for each in theirs]
    for name in ("no_sync", "clip_grad_norm_", "summon_full_params", "fsdp_modules", "apply", "check_is_root"):
        mine, other = (inspect.signature(getattr(each, name)) for each in (FSDP, Peer))
        assert list(mine.parameters) == list(other.parameters), name


@world(1)
def test_f1_29_one_rank_becomes_no_shard() -> None:
    for strategy in (None, S.SHARD_GRAD_OP):
        with pytest.warns(UserWarning, match="NO_SHARD"):
            model = FSDP(net(), sharding_strategy=strategy)
        assert model.sharding_strategy is S.NO_SHARD
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FSDP(net(), sharding_strategy=S.NO_SHARD)


@world(2)
def test_f1_29_no_shard_is_deprecated() -> None:
    with pytest.warns(FutureWarning, match="deprecated"):
        FSDP(net(), sharding_strategy=S.NO_SHARD)


@world(2)
@quiet
def test_refusals() -> None:
    """F1-13, F1-14, F1-20, F1-21, F1-27, F1-28, F1-30, F1-35, F1-36, F1-37: which, and what to do."""
    group, mesh = dist.group.WORLD, init_device_mesh("cpu", (2,))
    other = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    model = net()
    inner = FSDP(nn.Linear(2, 2))
    for error, words, options in (
        (ValueError, "not both", {"process_group": group, "device_mesh": mesh}),
        (ValueError, "takes one process group", {"process_group": (group, group)}),
        (ValueError, "shard_group, replicate_group", {"process_group": group, "sharding_strategy": S.HYBRID_SHARD}),
        (ValueError, "without auto_wrap_policy", {"sharding_strategy": S.HYBRID_SHARD}),
        (ValueError, "two dimensions", {"device_mesh": mesh, "sharding_strategy": S.HYBRID_SHARD}),
        (ValueError, "one dimension", {"device_mesh": other}),
        (ValueError, "ShardingStrategy", {"sharding_strategy": "FULL_SHARD"}),
        (ValueError, "param_init_fn", {"param_init_fn": 3}),
        (ValueError, "not both", {"ignored_modules": [model[0]], "ignored_states": [model[0]]}),
        (ValueError, "parameters only or modules only", {"ignored_states": [model[0], model[2].weight]}),
        (ValueError, "cannot be ignored", {"ignored_modules": [inner]}),
        (TypeError, "must be a list", {"ignored_modules": model[0].weight.numel()}),
        (TypeError, "modules", {"ignored_modules": [model[0].weight]}),
    ):
        with pytest.raises(error, match=words):
            FSDP(model, **options)
    scalar = nn.Linear(2, 2)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    frozen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    whole = nn.Linear(2, 2)
    whole.count = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    for module, words in ((scalar, "scalar"), (mixed, "same dtype"), (frozen, "same requires_grad"), (whole, "int64")):
        with pytest.raises(ValueError, match=words):
            FSDP(module)
    FSDP(frozen, use_orig_params=True)
    with pytest.raises(ValueError, match="wrapped already"):
        FSDP(nn.Sequential(FSDP(nn.Linear(2, 2))), auto_wrap_policy=always_wrap_policy)
    with pytest.warns(UserWarning, match="no forward"):
        FSDP(nn.ModuleList([nn.Linear(2, 2)]))


@world(2)
def test_f1_38_units_under_one_root_must_agree() -> None:
    x = torch.ones(1, 4)
    for options in ({"use_orig_params": True}, {"limit_all_gathers": False}):
        model = net()
        model[1] = FSDP(model[1], **options)
        with pytest.raises(ValueError, match=next(iter(options))):
            FSDP(model)(x)
    model = net()
    with mock.patch.dict("os.environ", FSDP_USE_FULL_PREC_IN_EVAL="1"):
        model[1] = FSDP(model[1])
    with pytest.raises(ValueError, match="full precision in eval"):
        FSDP(model)(x)


@world(2)
def test_f1_17_policies_pass_the_arguments_on() -> None:
    """F1-17, F1-110: to every module inside, unless the policy says otherwise."""
    model = FSDP(
        net(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=S.SHARD_GRAD_OP,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        cpu_offload=CPUOffload(offload_params=True),
        use_orig_params=True,
        limit_all_gathers=False,
        forward_prefetch=True,
    )
    found = FSDP.fsdp_modules(model)
    assert len(found) == 4
    for each in found:
        assert each.sharding_strategy is S.SHARD_GRAD_OP
        assert each.mixed_precision.param_dtype is torch.bfloat16
        assert each.cpu_offload.offload_params and each._use_orig_params and not each.limit_all_gathers
    policy = CustomPolicy(
        lambda module: {"sharding_strategy": S.FULL_SHARD} if isinstance(module, nn.Linear) else False
    )
    model = FSDP(net(), auto_wrap_policy=policy, sharding_strategy=S.SHARD_GRAD_OP)
    assert [each.sharding_strategy for each in FSDP.fsdp_modules(model)] == [S.SHARD_GRAD_OP, *[S.FULL_SHARD] * 3]


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2)
def test_f1_20_f1_27_ignored_states(originals: bool) -> None:
    """By modules or by parameters: they stay unsharded, and their gradients are this rank's own."""
    for kind in ("modules", "states", "parameters"):
        model = net()
        given = {
            "modules": {"ignored_modules": [model[1]]},
            "states": {"ignored_states": [model[1]]},
            "parameters": {"ignored_states": [*model[1].parameters()]},
        }[kind]
        ignored = model[1][0].weight
        wrapped = FSDP(model, use_orig_params=originals, **given)
        assert model[1][0].weight is ignored and ignored.shape == (6, 6)
        x = torch.full((1, 4), float(dist.get_rank() + 1))
        wrapped(x).sum().backward()
        assert ignored.grad is not None and ignored.grad.shape == (6, 6)
        both = [torch.empty_like(ignored.grad) for _ in range(2)]
        dist.all_gather(both, ignored.grad)
        assert not torch.equal(*both), "not reduced"
        managed = 4 * 6 + 6 + 6 * 2 + 2
        assert wrapped._handle.flat_param._unpadded_unsharded_size[0] == managed or originals


@world(2)
def test_f1_20_ignored_modules_of_the_root_are_ignored_inside() -> None:
    model = net()
    kept = model[1][0].weight
    wrapped = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), ignored_modules=[model[1][0]])
    assert wrapped.module[1].module[0].weight is kept
    assert wrapped.module[1].params == []


class Meta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 3, device="meta"))
        self.inner = nn.Linear(3, 3, device="meta")
        self.register_buffer("steps", torch.empty(2, device="meta"))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 2.0)
        self.steps.fill_(7.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.weight.T + self.steps.sum()


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2)
def test_f1_39_f1_21_meta(originals: bool) -> None:
    """Modules on meta are initialised by themselves, or by `param_init_fn`, module by module."""
    torch.manual_seed(1)
    model = FSDP(Meta(), use_orig_params=originals)
    assert torch.equal(model.module.steps, torch.full((2,), 7.0))
    found = full_parameters(model)
    assert torch.equal(found["weight"], torch.full((5, 3), 2.0)) and found["inner.weight"].abs().sum() > 0
    seen = []

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        for each in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(each, 3.0)

    model = FSDP(Meta(), param_init_fn=init, use_orig_params=originals)
    assert sorted(seen) == ["Linear", "Meta"]
    assert all(torch.equal(each, torch.full_like(each, 3.0)) for each in full_parameters(model).values())
    model(torch.ones(1, 3)).sum().backward()
    with pytest.warns(UserWarning, match="reset_parameters"), pytest.raises(RuntimeError, match="param_init_fn"):
        odd = nn.Module()
        odd.weight = nn.Parameter(torch.empty(2, device="meta"))
        FSDP(odd)


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(3, 4)
def test_f1_23_f1_40_values_of_the_first_rank(originals: bool) -> None:
    """`sync_module_states` sends parameters and buffers, on the CPU too; for hybrid over both groups."""
    torch.manual_seed(0)
    expected = nn.BatchNorm1d(5)
    nn.init.normal_(expected.weight)
    nn.init.normal_(expected.running_mean)
    torch.manual_seed(dist.get_rank())
    mine = nn.BatchNorm1d(5)
    nn.init.normal_(mine.weight)
    nn.init.normal_(mine.running_mean)
    options: dict = {}
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
        options = {"device_mesh": mesh, "sharding_strategy": S.HYBRID_SHARD}
    model = FSDP(mine, sync_module_states=True, use_orig_params=originals, **options)
    torch.testing.assert_close(full_parameters(model)["weight"], expected.weight.detach(), rtol=0, atol=0)
    torch.testing.assert_close(model.module.running_mean, expected.running_mean, rtol=0, atol=0)


@world(2)
def test_f1_22_f1_32_devices() -> None:
    """On a machine without accelerator the CPU needs no `device_id`; with it, by name or number, it is the same."""
    for given in (None, torch.device("cpu"), "cpu"):
        assert FSDP(net(), device_id=given).compute_device == torch.device("cpu")


@world(2)
def test_f1_41_a_unit_without_parameters() -> None:
    model = wrap(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), [])
    empty = FSDP(nn.ReLU())
    assert empty.params == [] and empty._handle is None and not empty._has_params
    assert empty(torch.tensor([-1.0])).item() == 0.0
    outer = FSDP(nn.Sequential(FSDP(nn.Linear(2, 2)), FSDP(nn.ReLU())))
    assert outer.params == []
    outer(torch.ones(1, 2)).sum().backward()
    assert outer.module[0].params[0].grad is not None
    assert len(model.params) == 1


@world(2)
def test_a_module_that_is_registered_twice() -> None:
    """Its parameters are sharded once."""
    shared = nn.Linear(2, 2)
    assert FSDP(nn.Sequential(shared, shared)).params[0]._unpadded_unsharded_size == torch.Size((6,))


@world(2)
@quiet
def test_arguments_of_the_wrong_kind() -> None:
    """What was expected, what was found, what to pass."""
    for options, words in (
        ({"mixed_precision": torch.bfloat16}, r"got torch.bfloat16. Pass MixedPrecision\(param_dtype=torch.bfloat16\)"),
        ({"mixed_precision": True}, r"got True. Pass MixedPrecision\("),
        ({"mixed_precision": MixedPrecisionPolicy(torch.bfloat16)}, "MixedPrecisionPolicy is for unshard.fully_shard"),
        ({"cpu_offload": True}, r"got True. Pass CPUOffload\(offload_params=True\)"),
        ({"cpu_offload": CPUOffloadPolicy()}, "OffloadPolicy is for unshard.fully_shard"),
        ({"backward_prefetch": "BACKWARD_PRE"}, r"BackwardPrefetch.BACKWARD_PRE or .*, got 'BACKWARD_PRE'"),
        ({"auto_wrap_policy": nn.Linear}, r"got the class Linear.*ModuleWrapPolicy\({Linear}\)"),
        ({"auto_wrap_policy": ModuleWrapPolicy}, r"an instance of it: ModuleWrapPolicy\(...\)"),
    ):
        with pytest.raises(TypeError, match=words):
            FSDP(net(), **options)
    for wrong in ("x", None, [nn.Linear(2, 2)]):
        with pytest.raises(TypeError, match="FullyShardedDataParallel takes a module, got"):
            FSDP(wrong)  # type: ignore[arg-type]
    for wrong in ("FULL", None):
        with pytest.raises(ValueError, match=r"StateDictType.FULL_STATE_DICT.*got"):
            FSDP.set_state_dict_type(FSDP(net()), wrong)  # type: ignore[arg-type]


@world(2)
@quiet
def test_f1_14_values_of_the_peer_are_taken() -> None:
    """Made before the drop-in was installed, say."""
    from torch.distributed.fsdp import BackwardPrefetch as Prefetch
    from torch.distributed.fsdp import CPUOffload as Offload
    from torch.distributed.fsdp import MixedPrecision as Precision

    model = FSDP(
        net(),
        mixed_precision=Precision(torch.bfloat16),  # type: ignore[arg-type]
        cpu_offload=Offload(False),  # type: ignore[arg-type]
        backward_prefetch=Prefetch.BACKWARD_POST,  # type: ignore[arg-type]
    )
    assert model.backward_prefetch is BackwardPrefetch.BACKWARD_POST
    assert model._state.unit.policy.param_dtype == torch.bfloat16


@world(2)
def test_f1_20_the_module_itself_may_be_ignored() -> None:
    """As in PyTorch, with a warning: there is nothing to shard then."""
    model = net()
    shapes = [parameter.shape for parameter in model.parameters()]
    with pytest.warns(UserWarning, match="nothing of it will be sharded"):
        wrapped = FSDP(model, ignored_modules=[model])
    assert [parameter.shape for parameter in wrapped.parameters()] == shapes
    wrapped(torch.ones(1, next(iter(shapes))[1])).sum().backward()


@world(2)
@quiet
def test_what_is_said_of_a_wrapper_is_not_about_fully_shard() -> None:
    """`optim.flat`, pickling."""
    for originals in (False, True):
        wrapped = FSDP(nn.Linear(2, 2), use_orig_params=originals)
        with pytest.raises(ValueError, match=r"flat takes parameters that fully_shard has sharded.*'weight'"):
            unshard.optim.flat(torch.optim.AdamW(wrapped.parameters()))
        with pytest.raises(NotImplementedError, match=r"cannot be pickled.*state_dict"):
            pickle.dumps(nn.Sequential(wrapped))
