"""The same misuse with PyTorch's FSDP2: programs that catch its exception catch ours."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer
import torch.distributed.fsdp.wrap
from bed import world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import unshard
import unshard.optim
import unshard.wrap

Misuse = Callable[[Any], Any]


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)


def layer(api: Any, **options: Any) -> Any:
    return api.fully_shard(nn.Linear(4, 4), mesh=options.pop("mesh", None) or mesh(), **options)


def stack(api: Any, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for each in (*model, model):
        api.fully_shard(each, mesh=mesh(), **options)
    return model


def x() -> torch.Tensor:
    return torch.ones(2, 4)


def applied_twice(api: Any) -> None:
    api.fully_shard(layer(api), mesh=mesh())


def child_ran_before(api: Any) -> None:
    model = nn.Sequential(layer(api))
    model[0](x())
    api.fully_shard(model, mesh=mesh())
    model(x())


def child_ran_alone_first(api: Any) -> None:
    model = stack(api)
    model[0](x())
    model(x())


def three_dimensions(api: Any) -> None:
    layer(api, mesh=mesh(1, 1, dist.get_world_size(), names=("a", "b", "c")))


def unnamed_mesh(api: Any) -> None:
    layer(api, mesh=mesh(1, dist.get_world_size()))


def scalar_parameter(api: Any) -> None:
    module = nn.Linear(4, 4)
    module.scale = nn.Parameter(torch.tensor(1.0))
    api.fully_shard(module, mesh=mesh())


def uneven_dimension_one(api: Any) -> None:
    api.fully_shard(nn.Linear(5, 4, bias=False), mesh=mesh(), shard_placement_fn=lambda p: Shard(1))


def dimension_too_large(api: Any) -> None:
    api.fully_shard(nn.Linear(4, 4), mesh=mesh(), shard_placement_fn=lambda p: Shard(3))


def placement_replicate(api: Any) -> None:
    api.fully_shard(nn.Linear(4, 4), mesh=mesh(), shard_placement_fn=lambda p: Replicate())


def parameter_on_meta(api: Any) -> None:
    with torch.device("meta"):
        module = nn.Linear(4, 4)
    api.fully_shard(module, mesh=mesh())(x())


def many_slices(api: Any) -> None:
    layer(api, reshard_after_forward=3)


def module_list(api: Any) -> None:
    api.fully_shard(nn.ModuleList([nn.Linear(4, 4)]), mesh=mesh())


def a_method_that_is_not_there(api: Any) -> None:
    api.register_fsdp_forward_method(layer(api), "missing")


def stream_with_replicas(api: Any) -> None:
    layer(api, mesh=mesh(dist.get_world_size(), 1, names=("a", "b"))).set_all_reduce_hook(print, stream=object())


def copied_as_a_pickle(api: Any) -> None:
    pickle.dumps(layer(api))


def prefetch_of_a_plain_module(api: Any) -> None:
    layer(api).set_modules_to_forward_prefetch([nn.Linear(4, 4)])


def a_plain_state_dict(api: Any) -> None:
    model = stack(api)
    model.load_state_dict(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict())


def missing_key(api: Any) -> None:
    stack(api).load_state_dict({})


def weight_outside_forward(api: Any) -> None:
    module = stack(api)[0]
    torch.nn.functional.linear(x(), module.weight)


def backward_twice(api: Any) -> None:
    loss = stack(api)(x()).sum()
    loss.backward()
    loss.backward()


def gradients_of_sharded_parameters(api: Any) -> None:
    model = stack(api)
    torch.autograd.grad(model(x()).sum(), list(model.parameters()))


def too_many_arguments(api: Any) -> None:
    layer(api).unshard(1, 2, 3)


def a_keyword_that_is_not_there(api: Any) -> None:
    layer(api, sharding="full")


def no_module(api: Any) -> None:
    api.fully_shard(3, mesh=mesh())


def ignored_that_are_no_parameters(api: Any) -> None:
    layer(api, ignored_params=3)


def root_methods_of_a_child(api: Any) -> None:
    model = stack(api)
    model(x())
    model[0].set_is_last_backward(False)
    model[0].reset_iter_state()


def moved_offloaded(api: Any) -> None:
    module = layer(api, offload_policy=api.CPUOffloadPolicy(pin_memory=False))
    module.to("meta")
    module(x())


def other_shape(api: Any) -> None:
    module = layer(api)
    module.weight = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh(), [Shard(0)]))
    module(x())


def frozen_integers(api: Any) -> None:
    module = nn.Module()
    module.numbers = nn.Parameter(torch.ones(4, dtype=torch.int64))
    api.fully_shard(module, mesh=mesh())


# -- optimizers, scalers, clipping and auto-wrap policies ----------------------------------------------------------


def scaler_and_optimizer(api: Any) -> tuple[Any, Any]:
    model = layer(api)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = (unshard.optim.GradScaler if api is unshard else torch.amp.GradScaler)("cpu")
    scaler.scale(model(x()).sum()).backward()
    return scaler, optimizer


def unscaled_twice(api: Any) -> None:
    scaler, optimizer = scaler_and_optimizer(api)
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def stepped_twice(api: Any) -> None:
    scaler, optimizer = scaler_and_optimizer(api)
    scaler.step(optimizer)
    scaler.step(optimizer)


def step_with_a_closure(api: Any) -> None:
    scaler, optimizer = scaler_and_optimizer(api)
    scaler.step(optimizer, closure=lambda: None)


def update_before_anything(api: Any) -> None:
    (unshard.optim.GradScaler if api is unshard else torch.amp.GradScaler)("cpu").update()


def scale_of_a_number(api: Any) -> None:
    scaler_and_optimizer(api)[0].scale(3)


def clip_of_not_finite_gradients(api: Any) -> None:
    model = layer(api)
    (model(x()).sum() * float("nan")).backward()
    clip = unshard.optim.clip_grad_norm_ if api is unshard else torch.nn.utils.clip_grad_norm_
    clip(model.parameters(), 1.0, error_if_nonfinite=True)


def policy_without_classes(api: Any) -> None:
    api.wrap.ModuleWrapPolicy(3)


def nested_enable_wrap(api: Any) -> None:
    with api.wrap.enable_wrap(wrapper_cls=nn.Sequential), api.wrap.enable_wrap(wrapper_cls=nn.Sequential):
        pass


MISUSES: tuple[Misuse, ...] = (
    applied_twice,
    child_ran_before,
    child_ran_alone_first,
    three_dimensions,
    unnamed_mesh,
    scalar_parameter,
    uneven_dimension_one,
    dimension_too_large,
    placement_replicate,
    parameter_on_meta,
    many_slices,
    module_list,
    a_method_that_is_not_there,
    stream_with_replicas,
    copied_as_a_pickle,
    prefetch_of_a_plain_module,
    a_plain_state_dict,
    missing_key,
    weight_outside_forward,
    backward_twice,
    gradients_of_sharded_parameters,
    too_many_arguments,
    a_keyword_that_is_not_there,
    no_module,
    ignored_that_are_no_parameters,
    root_methods_of_a_child,
    moved_offloaded,
    other_shape,
    frozen_integers,
    unscaled_twice,
    stepped_twice,
    step_with_a_closure,
    update_before_anything,
    scale_of_a_number,
    clip_of_not_finite_gradients,
    policy_without_classes,
    nested_enable_wrap,
)


def outcome(misuse: Misuse, api: Any) -> Exception | None:
    try:
        misuse(api)
    except Exception as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore")
@world(2)
def test_errors_are_subclasses_of_those_of_pytorch() -> None:
    wrong = []
    for misuse in MISUSES:
        theirs, ours = outcome(misuse, peer), outcome(misuse, unshard)
        assert theirs is not None, f"{misuse.__name__} is no misuse"
        if isinstance(theirs, AttributeError):
            continue  # an older torch: it has no check, or no such method
        if not isinstance(ours, type(theirs)):
            wrong.append(f"{misuse.__name__}: {theirs!r:.200} there, {ours!r:.200} here")
    assert not wrong, "\n".join(wrong)
