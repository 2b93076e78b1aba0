"""A program that uses each public name. `make types` checks it as strictly as mypy can, so no public name is untyped.

`tests/test_public_names.py` asserts that no name is missing here. Nothing runs this program.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from typing_extensions import assert_type

import unshard
import unshard.composable
import unshard.dropin
from unshard import checkpoint, errors, optim, tools, wrap


class Block(nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens


def policies() -> tuple[unshard.MixedPrecisionPolicy, list[unshard.OffloadPolicy]]:
    precision = unshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, overrides={"*norm*": torch.float32})
    return precision, [unshard.OffloadPolicy(), unshard.CPUOffloadPolicy(), unshard.OptimizerOffloadPolicy()]


class Gather(unshard.AllGather):
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        dist.all_gather_into_tensor(output_tensor, input_tensor, group)


def custom(comm: unshard.Comm, scatter: unshard.ReduceScatter, module: unshard.FSDPModule) -> torch.Tensor:
    module.set_custom_all_gather(Gather())
    module.set_custom_reduce_scatter(scatter)
    return comm.allocate([1], dtype=torch.float32, device=torch.device("cpu"))


def placement(parameter: nn.Parameter) -> unshard.ShardPlacementResult:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    infos = (unshard.DDPMeshInfo(mesh, replicate_mesh_dim=0), unshard.FSDPMeshInfo(mesh, shard_mesh_dim=1))
    assert_type(infos, tuple[unshard.DDPMeshInfo, unshard.FSDPMeshInfo])
    hybrid = unshard.HSDPMeshInfo(mesh, replicate_mesh_dim=0, shard_mesh_dim=1)
    return unshard.ShardPlacementResult(Shard(parameter.dim() - 1), hybrid)


def sharded() -> nn.Sequential:
    blocks = nn.Sequential(Block(), Block())
    unshard.sync_module_states(blocks)
    precision, offload = policies()
    assert_type(unshard.fully_shard(Block(), mp_policy=precision), Block)
    unshard.fully_shard([blocks[1]], offload_policy=offload[0], shard_placement_fn=placement)
    model = unshard.fully_shard(blocks, dp_mesh_dims=unshard.DataParallelMeshDims(shard="shard"))
    unshard.register_fsdp_forward_method(model, "generate")
    assert isinstance(model, unshard.FSDPModule)
    unshard.share_comm_ctx([model])
    model.set_requires_gradient_sync(False)
    model.set_modules_to_forward_prefetch([model])
    assert_type(model.unshard(async_op=True), unshard.UnshardHandle | None)
    assert_type(model.finalize_backward(async_op=True), unshard.GradientReductionHandle | None)
    with unshard.disable_fsdp_module_new_init():
        assert_type(unshard.get_cls_to_fsdp_cls(), dict[type, type])
    return assert_type(blocks, nn.Sequential)


def wrapped(model: nn.Module) -> unshard.FullyShardedDataParallel:
    wrapper = unshard.FullyShardedDataParallel(
        model,
        sharding_strategy=unshard.ShardingStrategy.FULL_SHARD,
        cpu_offload=unshard.CPUOffload(offload_params=False),
        auto_wrap_policy=unshard.ModuleWrapPolicy({Block}),
        backward_prefetch=unshard.BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=unshard.MixedPrecision(param_dtype=torch.bfloat16),
    )
    assert_type(wrapper.sharding_strategy, unshard.ShardingStrategy)
    flat = [each for each in wrapper.parameters() if isinstance(each, unshard.FlatParameter)]
    assert_type(flat, list[unshard.FlatParameter])
    with wrapper.no_sync(), unshard.FullyShardedDataParallel.summon_full_params(wrapper):
        wrapper.clip_grad_norm_(1.0)
    return wrapper


def wrapped_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[unshard.StateDictSettings]:
    wrapper = unshard.FullyShardedDataParallel
    kinds: list[tuple[unshard.StateDictType, unshard.StateDictConfig, unshard.OptimStateDictConfig]] = [
        (
            unshard.StateDictType.FULL_STATE_DICT,
            unshard.FullStateDictConfig(rank0_only=True),
            unshard.FullOptimStateDictConfig(rank0_only=True),
        ),
        (
            unshard.StateDictType.LOCAL_STATE_DICT,
            unshard.LocalStateDictConfig(),
            unshard.LocalOptimStateDictConfig(),
        ),
        (
            unshard.StateDictType.SHARDED_STATE_DICT,
            unshard.ShardedStateDictConfig(),
            unshard.ShardedOptimStateDictConfig(),
        ),
    ]
    for kind, config, optimizer_config in kinds:
        with wrapper.state_dict_type(model, kind, config, optimizer_config):
            state = wrapper.optim_state_dict(model, optimizer)
            wrapper.optim_state_dict_to_load(model, optimizer, state)
        wrapper.rekey_optim_state_dict(state, unshard.OptimStateKeyType.PARAM_ID, model)
    return [wrapper.set_state_dict_type(model, *kind) for kind in kinds]


def auto_wrap(model: nn.Module) -> nn.Module:
    assert_type(wrap.always_wrap_policy(model, True, 0), bool)
    assert_type(wrap.lambda_auto_wrap_policy(model, True, 0, lambda module: isinstance(module, Block)), bool)
    assert_type(wrap.size_based_auto_wrap_policy(model, True, 0, min_num_params=10), bool)
    assert_type(wrap.transformer_auto_wrap_policy(model, True, 0, {Block}), bool)
    wrap.ModuleWrapPolicy({Block})
    unshard.CustomPolicy(lambda module: {"forward_prefetch": True} if isinstance(module, Block) else False)
    wrap.CustomPolicy(lambda module: isinstance(module, Block))
    with wrap.enable_wrap(wrapper_cls=unshard.FullyShardedDataParallel):
        return assert_type(wrap.wrap(model), nn.Module)


def legacy(model: Block) -> Block:
    return assert_type(unshard.composable.fully_shard(model, policy=wrap.ModuleWrapPolicy({Block})), Block)


def uneven(model: nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
    with unshard.step(model, units={"vision.*": "keep"}, backwards=len(batches)) as step:
        for batch in batches:
            step.backward(batch.sum(), weight=batch.numel())
    with unshard.inference(model):
        model(batches[0])
    return assert_type(step.loss, torch.Tensor)


def optimizers(model: nn.Module) -> torch.optim.AdamW:
    optimizer = assert_type(optim.flat(torch.optim.AdamW(model.parameters())), torch.optim.AdamW)
    scaler = optim.GradScaler(init_scale=2.0)
    optim.ShardedGradScaler("cpu").unscale_(optimizer)
    scaler.step(optimizer)
    assert_type(optim.clip_grad_norm_(model.parameters(), 1.0), torch.Tensor)
    return optimizer


def captured(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[torch.Tensor, int]:
    def train_step(tokens: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return tokens.sum() * scale

    step = unshard.capture(train_step, model, optimizer)
    again: unshard.CapturedStep[..., torch.Tensor] = step
    again.forget()
    return assert_type(step(torch.ones(1), scale=2.0), torch.Tensor), step.recordings


def checkpoints(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    assert_type(checkpoint.save(folder, model=model, step=1, optimizer=optimizer), Path)
    with checkpoint.Saver(folder, keep_last=2) as saver:
        saver.prepare(model=model, optimizer=optimizer)
        saver.save(model=model, step=2, optimizer=optimizer)
        assert_type(saver.wait(), Path | None)
    assert_type(checkpoint.latest(folder), Path | None)
    assert_type(checkpoint.verify(folder), Path)
    assert_type(checkpoint.inspect(folder), str)
    print(checkpoint.diff(folder, folder))
    assert_type(checkpoint.export(folder, folder / "weights", dtype=torch.bfloat16), list[Path])
    print(checkpoint.load_safetensors(model, folder / "weights"))
    state = checkpoint.full_state_dict(model)
    print(checkpoint.load_full_state_dict(model, state))
    checkpoint.load_full_optimizer_state_dict(model, optimizer, checkpoint.full_optimizer_state_dict(model, optimizer))
    proof = checkpoint.prove_resume(lambda: {"model": model, "optimizer": optimizer}, lambda run: None)
    assert_type(proof, checkpoint.ResumeReport)
    return assert_type(checkpoint.load(folder, model=model, optimizer=optimizer), int)


def reports(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> list[str]:
    assert_type(tools.precision(model, optimizer), tools.PrecisionReport)
    with assert_type(tools.precision_audit(model, optimizer), tools.PrecisionAudit) as audit:
        model(torch.ones(1))
    with tools.ledger(model, optimizer) as ledger, tools.timeline(model) as times, tools.watch(model) as watch:
        model(torch.ones(1))
    with tools.record(folder, model, optimizer) as recording:
        recording.step(loss=torch.ones(()))
    plan = tools.plan(Block, world=8)
    checked = tools.verify(Block, ranks=[1, 2])
    diagnosis = tools.doctor(2, quick=True)
    tools.explain_hangs(10.0)
    tools.report(folder / "report.html", plan, ledger, times)
    assert_type(plan.peak, int)
    assert_type(times.step_ms, float)
    found = [str(finding) for finding in watch.findings]
    return found + audit.differences + [str(each) for each in (checked.agree, diagnosis.ok)]


def caught() -> list[type[Exception]]:
    from_top = [unshard.UnshardError, unshard.CheckpointError, unshard.CollectiveError, unshard.OrderError]
    assert_type(checkpoint.CheckpointError, type[errors.CheckpointError])
    return [*from_top, errors.ArgumentError]


def replaced() -> None:
    unshard.dropin.install(child_processes=True)
    assert_type(unshard.dropin.is_installed(), bool)
    unshard.dropin.uninstall()
    with unshard.dropin.stand_in():
        print(unshard.__version__)
