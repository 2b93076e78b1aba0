"""Replacements of PyTorch's FSDP, also in modules that were imported before, and errors for missing names."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed._composable as composable
import torch.distributed.checkpoint.state_dict as state_dict
import torch.distributed.fsdp as fsdp
import torch.distributed.pipelining.schedules as schedules
import torch.distributed.pipelining.stage as stage
from torch import nn
from torch.distributed._composable import replicate_with_fsdp

import unshard
import unshard.composable
from unshard import dropin
from unshard.dropin import STATE_MEMBERS, torch_composable, torch_fsdp
from unshard.engine.api import FSDPState
from unshard.errors import StateError, UnsupportedError

# Inside an object, where no reference is changed.
THEIRS = SimpleNamespace(
    fsdp=fsdp,
    modules={name: module for name, module in sys.modules.items() if name.startswith("torch.distributed.fsdp")},
    **{name: getattr(fsdp, name) for name in fsdp.__all__},
)


@pytest.fixture
def installed() -> Iterator[None]:
    with dropin.stand_in():
        yield
    assert not dropin.is_installed()


@pytest.fixture
def program() -> Iterator[ModuleType]:
    """A module that was imported before anything was installed."""
    module = ModuleType("program")
    sys.modules["program"] = module
    exec("import torch.distributed.fsdp as fsdp\nfrom torch.distributed.fsdp import *", vars(module))
    yield module
    del sys.modules["program"]


def define(program: ModuleType, source: str) -> None:
    exec(textwrap.dedent(source), vars(program))


def test_imports_find_ours(installed: None) -> None:
    from torch.distributed._composable.fsdp import FSDPModule as third
    from torch.distributed._composable.fsdp.fully_shard import fully_shard as fourth
    from torch.distributed.fsdp import FSDPModule as first
    from torch.distributed.fsdp._fully_shard._fully_shard import FSDPModule as second
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    assert first is second is third is unshard.FSDPModule
    assert fourth is composable.fsdp.fully_shard is dist.fsdp.fully_shard is unshard.fully_shard
    assert ModuleWrapPolicy.__module__.startswith("unshard.")
    assert importlib.import_module("torch.distributed.fsdp") is dist.fsdp
    assert dist.fsdp._fully_shard._fsdp_common.FSDPMeshInfo is unshard.FSDPMeshInfo


def test_modules_without_a_file_of_their_own(installed: None) -> None:
    """They have our names as far as PyTorch's module has them, from the package around them."""
    from torch.distributed.fsdp import _common_utils, _runtime_utils
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_state

    assert _runtime_utils.BackwardPrefetch is unshard.BackwardPrefetch
    assert _fsdp_param.FSDPMeshInfo is unshard.FSDPMeshInfo
    assert "FullyShardedDataParallel" not in dir(_runtime_utils) and "wrap" not in dir(_runtime_utils)
    with pytest.raises(AttributeError, match="nor has PyTorch"):
        _ = _fsdp_param.BackwardPrefetch
    # One name, and two functions: for modules of FSDP1 and of FSDP2.
    assert _common_utils._get_module_fsdp_state is torch_fsdp._get_module_fsdp_state
    assert _fsdp_state._get_module_fsdp_state is torch_fsdp._fully_shard._get_module_fsdp_state
    assert torch_fsdp._get_module_fsdp_state is not torch_fsdp._fully_shard._get_module_fsdp_state


def test_every_name_is_ours_or_missing(installed: None) -> None:
    """No name of PyTorch's trees leads to PyTorch's code, whoever asks for it, PyTorch apart."""
    seen = {"ours": 0, "missing": 0}
    for tree in (torch_fsdp, torch_fsdp._fully_shard):
        assert set(tree.__all__) <= set(dir(tree))
    for name, module in THEIRS.modules.items():
        stand_in = sys.modules[name]
        assert stand_in is not module
        for attribute, value in vars(module).items():
            if attribute.startswith("__") or not (getattr(value, "__module__", None) or "").startswith(
                "torch.distributed.fsdp"
            ):
                continue
            found = getattr(stand_in, attribute)
            assert found is not value, f"{name}.{attribute}"
            seen["missing" if isinstance(found, dropin.modules.MissingName) else "ours"] += 1
    assert seen["ours"] > 80 and seen["missing"] > 300


SURFACE = {
    "": "FullyShardedDataParallel ShardingStrategy BackwardPrefetch MixedPrecision CPUOffload StateDictType "
    "StateDictConfig FullStateDictConfig LocalStateDictConfig ShardedStateDictConfig OptimStateDictConfig "
    "FullOptimStateDictConfig LocalOptimStateDictConfig ShardedOptimStateDictConfig StateDictSettings "
    "OptimStateKeyType FlatParameter fully_shard FSDPModule UnshardHandle register_fsdp_forward_method share_comm_ctx "
    "MixedPrecisionPolicy OffloadPolicy CPUOffloadPolicy DataParallelMeshDims",
    ".wrap": "always_wrap_policy lambda_auto_wrap_policy transformer_auto_wrap_policy size_based_auto_wrap_policy "
    "enable_wrap wrap CustomPolicy ModuleWrapPolicy _or_policy _wrap_module_cls_individually _recursive_wrap "
    "_module_wrap_policy _Policy",
    ".sharded_grad_scaler": "ShardedGradScaler",
    "._traversal_utils": "_get_fsdp_states _get_fsdp_states_with_modules _get_fsdp_handles",
    "._fully_shard._fsdp_api": "Comm AllGather ReduceScatter",
    "._fully_shard._fsdp_common": "ShardPlacementResult FSDPMeshInfo HSDPMeshInfo DDPMeshInfo",
    "._fully_shard._fsdp_init": "_get_mesh_info",
    "._fully_shard._fully_shard": "get_cls_to_fsdp_cls disable_fsdp_module_new_init",
}


@pytest.mark.parametrize("module", SURFACE)
def test_names_that_programs_ask_for(module: str, installed: None) -> None:
    """Contract F1-01 to F1-03, FS-01, FS-02."""
    stand_in = importlib.import_module(f"torch.distributed.fsdp{module}")
    for name in SURFACE[module].split():
        if module == "" or hasattr(stand_in._real, name):  # PyTorch 2.11 and 2.12 lack some of the private names
            assert getattr(stand_in, name).__module__.startswith("unshard."), name


def test_star_import_and_dir(installed: None) -> None:
    names: dict[str, Any] = {}
    exec("from torch.distributed.fsdp import *", names)
    assert set(dist.fsdp.__all__) <= set(names)
    assert names["fully_shard"] is unshard.fully_shard
    assert "fully_shard" in dir(dist.fsdp) and "_real" not in dir(dist.fsdp)
    assert "unshard" in repr(dist.fsdp)


def test_references_that_were_imported_before(program: ModuleType) -> None:
    define(
        program,
        """
        import functools

        kinds = (fully_shard, FSDPModule)
        strategies = {"zero3": ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD: "ddp"}
        nested = [{"classes": {FSDPModule, int}, "frozen": frozenset({FSDPModule})}]
        shard = functools.partial(fully_shard, reshard_after_forward=False)
        policy = functools.partial(fsdp.wrap.size_based_auto_wrap_policy, min_num_params=10)

        def check(module, kind=FSDPModule, *, strategy=ShardingStrategy.SHARD_GRAD_OP):
            return isinstance(module, kind), strategy

        def make():
            inner = FSDPModule
            return lambda module: isinstance(module, inner)

        closed = make()

        class Trainer:
            kind = FSDPModule
            shard = staticmethod(fully_shard)
            apply = classmethod(fully_shard)
            forward_method = property(register_fsdp_forward_method)

            @property
            def sharded(self, kind=FSDPModule):
                return kind

            def is_sharded(self, module, kind=FSDPModule):
                return isinstance(module, kind)
        """,
    )
    before = copy.copy(vars(program))

    def assert_all(module: Any, strategy: Any) -> None:
        sharded = object.__new__(type("Sharded", (module.FSDPModule,), {}))
        assert program.kinds == (module.fully_shard, module.FSDPModule)
        assert program.strategies == {"zero3": strategy.FULL_SHARD, strategy.NO_SHARD: "ddp"}
        assert program.nested == [{"classes": {module.FSDPModule, int}, "frozen": frozenset({module.FSDPModule})}]
        assert program.shard.func is module.fully_shard and program.shard.keywords == {"reshard_after_forward": False}
        assert program.policy.keywords == {"min_num_params": 10}
        assert program.check(sharded) == (True, strategy.SHARD_GRAD_OP)
        assert program.closed(sharded)
        assert program.Trainer.kind is module.FSDPModule and program.Trainer.shard is module.fully_shard
        assert program.Trainer().is_sharded(sharded) and program.Trainer().sharded is module.FSDPModule
        assert program.Trainer.apply.__func__ is module.fully_shard
        assert program.Trainer.forward_method.fget is module.register_fsdp_forward_method

    assert_all(THEIRS, THEIRS.ShardingStrategy)
    dropin.install()
    try:
        assert_all(unshard, unshard.ShardingStrategy)
        assert program.fsdp is sys.modules["torch.distributed.fsdp"] is not THEIRS.fsdp
        assert program.policy.func.__module__ == "unshard.wrap"
    finally:
        dropin.uninstall()
    assert_all(THEIRS, THEIRS.ShardingStrategy)
    assert program.fsdp is THEIRS.fsdp and vars(program) == before


def test_references_of_torch_itself(installed: None) -> None:
    """Whoever asks whether a module is sharded means ours; what they use besides stays what it was."""
    assert stage.FSDPModule is schedules.FSDPModule is unshard.FSDPModule
    if hasattr(stage, "fully_shard"):  # until torch 2.14
        assert stage.fully_shard is unshard.fully_shard
    else:
        assert stage.GradientReductionHandle is unshard.GradientReductionHandle
    assert state_dict.StateDictType is unshard.StateDictType
    assert state_dict.FullStateDictConfig is unshard.FullStateDictConfig
    assert state_dict.FSDP is unshard.FullyShardedDataParallel
    if hasattr(state_dict, "HYBRID_SHARDING_STRATEGIES"):  # since torch 2.13
        assert set(state_dict.HYBRID_SHARDING_STRATEGIES) < set(unshard.ShardingStrategy)
    assert state_dict._get_module_fsdp_state_if_fully_sharded_module.__module__.startswith("unshard.")
    tensor_parallel = importlib.import_module("torch.distributed.tensor.parallel.fsdp")
    assert tensor_parallel._create_chunk_sharded_tensor.__module__ == "torch.distributed.fsdp._shard_utils"
    # Built on PyTorch's own engine, with which it goes on.
    assert replicate_with_fsdp.FSDPModule is THEIRS.FSDPModule


def test_torch_keeps_its_own_helpers(installed: None) -> None:
    """The compiler compares functions with some of PyTorch's, which it imports when it runs."""
    asking: dict[str, Any] = {"__name__": "torch._dynamo.variables.functions"}
    source = "from torch.distributed.fsdp._flat_param import FlatParamHandle; found = FlatParamHandle.flatten_tensors"
    exec(source, asking)
    assert asking["found"].__module__ == "torch.distributed.fsdp._flat_param"
    with pytest.raises(UnsupportedError):
        exec(source, {"__name__": "program"})


def test_types_that_programs_only_name(installed: None) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup, RegisterPostBackwardFunction
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext

    assert FSDPState is unshard.engine.api.FSDPState and callable(FSDPState._lazy_init)
    for each in (FSDPParam, FSDPParamGroup, RegisterPostBackwardFunction, FSDPStateContext):
        assert isinstance(each, type) and not isinstance(installed, each)
        with pytest.raises(UnsupportedError, match="cannot be created"):
            each()
        with pytest.raises(UnsupportedError, match="would have no effect"):
            each.unshard = None


def test_missing_names_say_so_where_they_are_used(installed: None) -> None:
    from torch.distributed.fsdp._flat_param import FlatParamHandle
    from torch.distributed.fsdp._runtime_utils import _post_backward_final_callback as missing

    class Derived(FlatParamHandle):  # a library may define what nobody makes an instance of
        pass

    assert FlatParamHandle | None is FlatParamHandle and None | FlatParamHandle is FlatParamHandle
    uses = [
        lambda: missing(1, a=2),
        lambda: FlatParamHandle.flatten_tensors,
        lambda: setattr(FlatParamHandle, "flatten", 1),
        lambda: isinstance(installed, FlatParamHandle),
        lambda: issubclass(int, FlatParamHandle),
        lambda: list(missing),
        lambda: 1 in missing,
        lambda: missing[0],
        lambda: missing.__enter__(),
        lambda: copy.copy(missing),
        lambda: pickle.dumps(missing),
        lambda: Derived(),
        lambda: Derived(1),
    ]
    for number, use in enumerate(uses):
        with pytest.raises(UnsupportedError, match=r"torch\.distributed\.fsdp\._\w+\.\w+ is not available: unshard"):
            use()
            pytest.fail(str(number))
    assert repr(missing) == (
        "<torch.distributed.fsdp._runtime_utils._post_backward_final_callback, which unshard does not have>"
    )
    assert missing is sys.modules["torch.distributed.fsdp._runtime_utils"]._post_backward_final_callback


def test_the_legacy_call() -> None:
    """PyTorch has taken it out; programs of its time find it where it was."""
    assert not hasattr(composable, "fully_shard")
    with dropin.stand_in():
        from torch.distributed._composable import fully_shard

        assert fully_shard is torch_composable.fully_shard  # test beds import it from there

        assert fully_shard is unshard.composable.fully_shard is not unshard.fully_shard
    assert not hasattr(composable, "fully_shard")


def test_what_pipelines_call_is_there_while_installed() -> None:
    before = dict(vars(FSDPState))
    with dropin.stand_in():
        assert all(vars(FSDPState)[name] is member for name, member in STATE_MEMBERS.items())
    assert vars(FSDPState) == before


def test_names_that_nobody_has(installed: None) -> None:
    with pytest.raises(ImportError, match="no_such_name"):
        from torch.distributed.fsdp import no_such_name  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import torch.distributed.fsdp.no_such_module  # noqa: F401
    with pytest.raises(AttributeError, match="nor has PyTorch"):
        _ = dist.fsdp.no_such_name
    assert not hasattr(dist.fsdp, "no_such_name") and hasattr(dist.fsdp, "fully_shard")


def test_patching(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names we have can be patched where importers look; a patch that could have no effect is refused."""
    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", len)
    from torch.distributed.fsdp import fully_shard

    assert fully_shard is len
    monkeypatch.undo()
    assert dist.fsdp.fully_shard is unshard.fully_shard
    with pytest.raises(UnsupportedError, match="cannot be assigned"):
        dist.fsdp._runtime_utils._unshard = len


def test_missing_names_imported_before(program: ModuleType) -> None:
    define(program, "from torch.distributed.fsdp._flat_param import FlatParamHandle, HandleShardingStrategy as Kind")
    define(program, "default = Kind.FULL_SHARD")
    with dropin.stand_in():
        for value in (program.FlatParamHandle, program.Kind, program.default):
            with pytest.raises(UnsupportedError, match="unshard"):
                value()
    assert program.default is program.Kind.FULL_SHARD


def test_a_class_that_derives_from_theirs_already(program: ModuleType) -> None:
    """Cannot be changed any more: an error, and nothing is left behind."""
    define(program, "class Mine(FullyShardedDataParallel): __module__ = 'program'")
    with pytest.raises(StateError, match=r"program\.Mine derives from .*before program is imported"):
        dropin.install()
    assert not dropin.is_installed()
    assert_as_it_was()


def assert_as_it_was() -> None:
    assert dist.fsdp is THEIRS.fsdp is fsdp is sys.modules["torch.distributed.fsdp"]
    assert all(sys.modules[name] is module for name, module in THEIRS.modules.items())
    assert stage.FSDPModule is THEIRS.FSDPModule and state_dict.StateDictType is THEIRS.StateDictType
    assert composable.fsdp.fully_shard is THEIRS.fully_shard


def test_twice_and_back() -> None:
    dropin.install()
    stand_in = dist.fsdp
    dropin.install()
    assert dist.fsdp is stand_in and dropin.is_installed()
    with dropin.stand_in():
        pass
    assert dropin.is_installed() and dist.fsdp is stand_in
    dropin.uninstall()
    assert_as_it_was()
    dropin.uninstall()
    assert_as_it_was()
    with pytest.raises(ZeroDivisionError), dropin.stand_in():
        raise ZeroDivisionError
    assert_as_it_was()


def test_activation_checkpointing_of_torch(installed: None) -> None:
    """It applies policies with the functions of `torch.distributed.fsdp.wrap`."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointWrapper,
        apply_activation_checkpointing,
    )
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, lambda_auto_wrap_policy

    policies = (
        {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})},
        {"auto_wrap_policy": functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear))},
        {"check_fn": lambda each: isinstance(each, nn.Linear)},
    )
    for policy in policies:
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        apply_activation_checkpointing(model, **policy)
        assert isinstance(model[0], CheckpointWrapper) and isinstance(model[1][0], CheckpointWrapper)
        assert not isinstance(model[1], CheckpointWrapper) and not isinstance(model[1][1], CheckpointWrapper)


def test_installing_first_thing() -> None:
    """Before anything of PyTorch's but itself: nobody has imported torch.distributed.fsdp yet."""
    code = """
        import sys
        import unshard.dropin

        unshard.dropin.install()
        import torch.distributed.checkpoint.state_dict
        import torch.distributed.pipelining
        import torch.distributed.tensor.parallel.fsdp
        import torch.distributed.optim
        from torch.distributed.fsdp import FSDPModule

        assert torch.distributed.pipelining.stage.FSDPModule is FSDPModule is unshard.FSDPModule
        assert torch.distributed.checkpoint.state_dict.StateDictType is unshard.StateDictType
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=300)
