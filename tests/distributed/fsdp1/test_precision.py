"""Mixed precision of the wrapper (contract part D)."""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.recorders import Collectives
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

from unshard import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from unshard import FullyShardedDataParallel as FSDP
from unshard.fsdp1.state import _get_fsdp_handles
from unshard.optim import ShardedGradScaler
from unshard.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

S = ShardingStrategy
half, single, double, brain = torch.float16, torch.float32, torch.float64, torch.bfloat16
IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"

# D-56: all fp16; reduce only; parameters and buffers; none; all different.
CONFIGS = {
    "all": MixedPrecision(half, half, half),
    "reduce": MixedPrecision(reduce_dtype=half),
    "params_and_buffers": MixedPrecision(param_dtype=half, buffer_dtype=half),
    "none": MixedPrecision(),
    "different": MixedPrecision(param_dtype=half, buffer_dtype=brain, reduce_dtype=single),
}


@contextlib.contextmanager
def full_precision_in_eval(on: bool) -> Iterator[None]:
    with mock.patch.dict(os.environ, {IN_EVAL: "1" if on else "0"}):
        yield


def quietly(make: Any, *args: Any, **options: Any) -> Any:
    """One rank becomes NO_SHARD with a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args, **options)


class Probe(nn.Module):
    """D-50: one linear layer and a float64 buffer; looks at itself and at its model in every forward."""

    def __init__(self, full: torch.dtype, buffer: str) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10, bias=False).to(full)
        self.register_buffer(buffer, torch.randn((1, 2), dtype=double))
        self.full, self.of_buffer = full, buffer

    def forward(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x, model, config = given
        assert x.dtype == (config.param_dtype or self.full), "D-51"
        assert getattr(self, self.of_buffer).dtype == (config.buffer_dtype or double), "D-51"
        active = 0
        for unit in FSDP.fsdp_modules(model):
            (parameter,) = unit.params  # D-52
            if parameter.data_ptr() != parameter._local_shard.data_ptr():  # D-53
                active += 1
                assert parameter.dtype == (config.param_dtype or self.full)
                shows = unit.sharding_strategy is not S.NO_SHARD
                if config.param_dtype is not None and shows:
                    assert parameter._mp_shard.untyped_storage().size() == 0
            elif unit.sharding_strategy is not S.NO_SHARD:
                assert parameter.dtype == self.full, "D-54"
        assert active or dist.get_world_size() == 1, "D-55"
        return self.lin(x), model, config


def simple(full: torch.dtype, **options: Any) -> FSDP:
    return quietly(FSDP, Probe(full, "buffer"), **options)


def nested(full: torch.dtype, **options: Any) -> FSDP:
    inner = quietly(FSDP, Probe(full, "buffer1"), **options)
    return quietly(FSDP, nn.Sequential(inner, Probe(full, "buffer0")), **options)


def check_low_shards(model: FSDP, config: MixedPrecision) -> None:
    """D-57: freed or absent."""
    for unit in FSDP.fsdp_modules(model):
        for parameter in unit.params:
            if config.param_dtype is None:
                assert not hasattr(parameter, "_mp_shard")
            else:
                assert parameter._mp_shard.untyped_storage().size() == 0


def reduces_in(recorder: Collectives) -> set[torch.dtype]:
    """What gradients were reduced in: with one rank, or without cutting, nothing is scattered."""
    return {dtype for call in recorder.calls if call.kind == "reduce_scatter" for dtype in call.dtypes}


def run_e2e(model: FSDP, config: MixedPrecision, full: torch.dtype, scaled: bool) -> None:
    """D-57..D-62: three iterations."""
    originals = {id(buffer): name for name, buffer in model.named_buffers()}
    assert originals
    scaler = ShardedGradScaler(enabled=scaled)
    optimizer = torch.optim.Adam(model.parameters())
    kept = config.buffer_dtype or double
    for _ in range(3):
        x = torch.randn(3, 10, dtype=full)
        output, *_ = model((x, model, config))
        assert all(buffer.dtype == kept for buffer in model.buffers())
        check_low_shards(model, config)
        loss = scaler.scale(output.sum())
        assert loss.dtype == (config.param_dtype or full), "D-58"
        with Collectives() as recorder:
            loss.backward()
        expected = config.reduce_dtype or config.param_dtype or full
        assert reduces_in(recorder) == ({expected} if dist.get_world_size() > 1 else set()), "D-59"
        assert all(buffer.dtype == kept for buffer in model.buffers())
        check_low_shards(model, config)
        for parameter in model.parameters():  # D-60
            assert parameter.dtype == full
            assert parameter.grad is None or parameter.grad.dtype == full
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with FSDP.summon_full_params(model):  # D-61
            assert all(parameter.dtype == full for parameter in model.parameters())
            assert all(buffer.dtype == kept for buffer in model.buffers())
            check_low_shards(model, config)
        for name, tensor in model.state_dict().items():  # D-62
            assert tensor.dtype == (double if "buffer" in name else full), name
        assert all(buffer.dtype == kept for buffer in model.buffers())


@pytest.mark.slow
@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@world(1, 2)
def test_mixed_precision_e2e_full_shard(config: MixedPrecision, originals: bool) -> None:
    """D-50..D-62, D-64: offload x full dtype x scaler x prefetch, one unit and two."""
    flags, prefetches = (False, True), (None, *BackwardPrefetch)
    for offload, full, scaled in itertools.product(flags, (single, double), flags):
        for number, prefetch in enumerate(prefetches):
            options = {
                "mixed_precision": config,
                "cpu_offload": CPUOffload(offload),
                "backward_prefetch": prefetch,
                "forward_prefetch": bool(number % 2),
                "use_orig_params": originals,
            }
            for make in (simple, nested) if number else (nested,):
                run_e2e(make(full, **options), config, full, scaled)


@world(1, 2)
def test_mixed_precision_no_reshard_after_forward() -> None:
    """D-63."""
    config = CONFIGS["different"]
    options = {"cpu_offload": CPUOffload(True), "backward_prefetch": None, "sharding_strategy": S.SHARD_GRAD_OP}
    run_e2e(nested(double, mixed_precision=config, **options), config, double, scaled=False)


D_TABLE = [
    # original, param, reduce, keep -> compute, reduce used, gradient if cut, gradient if not
    (single, None, None, False, single, single, single, single),  # D-20
    (single, half, None, False, half, half, single, single),  # D-21
    (single, None, half, False, single, half, single, single),  # D-22
    (single, half, half, False, half, half, single, single),  # D-23
    (single, half, half, True, half, half, half, half),  # D-24
    (single, half, single, False, half, single, single, single),  # D-25
    (single, half, single, True, half, single, half, single),  # D-26
    (single, single, None, False, single, single, single, single),  # D-27
    (single, brain, single, True, brain, single, brain, single),  # D-28
    (half, None, None, False, half, half, half, half),  # D-30
    (half, half, None, False, half, half, half, half),  # D-31
    (half, None, half, False, half, half, half, half),  # D-32
    (half, half, single, False, half, single, half, half),  # D-33
    (half, half, single, True, half, single, half, single),  # D-34
    (half, single, None, False, single, single, half, half),  # D-35
    (half, brain, single, True, brain, single, brain, single),  # D-36
]


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2)
def test_dtype_table(originals: bool) -> None:
    """D-01..D-06, D-20..D-28, D-30..D-36, FI-03, FI-06: also for modules made half after wrapping (F1-48)."""
    for row, strategy, late in itertools.product(D_TABLE, (S.FULL_SHARD, S.NO_SHARD), (False, True)):
        original, param, reduce, keep, compute, used, cut, whole = row
        if late and original is single:
            continue
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if not late:
            module = module.to(original)
        config = MixedPrecision(param, reduce, keep_low_precision_grads=keep)
        model = quietly(FSDP, module, mixed_precision=config, sharding_strategy=strategy, use_orig_params=originals)
        if late:
            model = model.to(original)
        for _ in range(2):  # D-69: added to what is there
            output = model(torch.randn(2, 4, dtype=original))
            assert output.dtype == compute, row
            output.sum().backward()
        (handle,) = _get_fsdp_handles(model)
        assert handle._orig_param_dtype == handle.flat_param.dtype == original, row
        assert (handle._fwd_bwd_param_dtype, handle._reduce_dtype) == (compute, used), row
        assert hasattr(handle.flat_param, "_mp_shard") == (compute != original), row
        expected = whole if strategy is S.NO_SHARD else cut
        assert handle.flat_param.grad is not None and handle.flat_param.grad.dtype == expected, row
        for parameter in model.parameters():
            assert parameter.dtype == original
            assert parameter.grad is None or parameter.grad.dtype == expected, (row, strategy)


class Tokens(nn.Module):
    """D-65: a transformer with the embedding tied to the output, batch norm, a float and a long buffer."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 16)
        layers = {"num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 8, "dropout": 0.1}
        self.transformer = nn.Transformer(d_model=16, nhead=2, **layers)
        self.out = nn.Linear(16, 23)
        self.out.weight = self.embed.weight
        self.register_buffer("base", torch.ones(16))
        self.register_buffer("long", torch.zeros(16, dtype=torch.long))
        self.bn = nn.BatchNorm1d(2) if norm else nn.Identity()

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        assert src.dtype == torch.int64 and self.long.dtype == torch.int64, "D-65, D-66"
        src, tgt = (self.embed(each) + self.base + self.long.type_as(self.base) for each in (src, tgt))
        return self.out(self.transformer(src, self.bn(tgt)))

    @staticmethod
    def batch() -> tuple[Tensor, Tensor]:
        return torch.arange(12).view(6, 2), torch.arange(8).view(4, 2)

    @staticmethod
    def loss(output: Tensor) -> Tensor:
        target = Tokens.batch()[1].flatten()
        return nn.functional.cross_entropy(output.flatten(0, 1), target, reduction="sum")


EMBEDDING = {
    "reduce": MixedPrecision(reduce_dtype=half),
    "only_params_and_bufs": MixedPrecision(param_dtype=half, buffer_dtype=half),
    "default": MixedPrecision(half, half, half),
    "params_and_reduce_diff": MixedPrecision(param_dtype=half, reduce_dtype=single, buffer_dtype=half),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@pytest.mark.parametrize("config", EMBEDDING.values(), ids=EMBEDDING)
@world(2)
def test_mp_embedding(config: MixedPrecision, originals: bool) -> None:
    """D-65, D-66: test_mp_embedding_reduce, _only_params_and_bufs, _default, _params_and_reduce_diff."""
    torch.manual_seed(0)
    model = FSDP(Tokens(), mixed_precision=config, use_orig_params=originals)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        loss = model.module.loss(model(*model.module.batch()))
        assert loss.dtype == (config.param_dtype or single)
        with Collectives() as recorder:
            loss.backward()
        assert reduces_in(recorder) == {config.reduce_dtype or config.param_dtype or single}
        optimizer.step()
        optimizer.zero_grad()


def convolutions() -> nn.Module:
    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, 2), nn.BatchNorm2d(after), nn.ReLU(inplace=True))

    blocks = [block(before, after) for before, after in ((3, 8), (8, 16), (16, 16))]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


@pytest.mark.filterwarnings("ignore")
@world(2)
def test_mixed_precision_resnet() -> None:
    """D-67: with a policy by size, each batch norm of a convolutional model is a unit of its own; synchronised ones
    too (whose forward is for devices only, so plain ones train here)."""
    for convert in (True, False):
        model = convolutions()
        if convert:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        count = sum(isinstance(each, _BatchNorm) for each in model.modules())
        policy = partial(size_based_auto_wrap_policy, min_num_params=100)
        wrapped = FSDP(model, auto_wrap_policy=policy, mixed_precision=MixedPrecision(half, half, half))
        norms = [each for each in FSDP.fsdp_modules(wrapped) if isinstance(each.module, _BatchNorm)]
        assert len(norms) == count == 3
        if not convert:
            wrapped(torch.randn(2, 3, 40, 40)).sum().backward()
            assert all(each.params[0].grad.dtype == single for each in norms)


class Pair(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(10, 10), quietly(FSDP, nn.Linear(10, 10), **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin2(self.lin1(x))


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(1, 2)
def test_grads_reduced_precision(originals: bool) -> None:
    """D-68, D-69, D-24: gradients stay in half precision while they add up."""
    for offload in (False, True):
        options = {
            "mixed_precision": MixedPrecision(half, half, half, keep_low_precision_grads=True),
            "cpu_offload": CPUOffload(offload),
            "use_orig_params": originals,
        }
        model = quietly(FSDP, Pair(**options), **options)
        for _ in range(6):
            model(torch.ones(1, 10)).sum().backward()
            found = [each.grad for each in model.parameters() if each.grad is not None]
            assert found and all(each.dtype == half for each in found)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn, self.fc2 = nn.Linear(40, 30, bias=False), nn.BatchNorm1d(4), nn.Linear(30, 10)
        self.ln, self.fc3 = nn.LayerNorm(10), nn.Linear(10, 4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        for name in ("fc1", "bn", "fc2", "ln", "fc3"):
            x = getattr(self, name)(x)
            self.seen[name] = x.dtype
        return x


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2)
def test_mp_batchnorm(originals: bool) -> None:
    """D-70, D-71, F1-111: norms are units without mixed precision; what leaves them is what came in."""
    for convert in (False, True):
        module = nn.SyncBatchNorm.convert_sync_batchnorm(Norms()) if convert else Norms()
        config = MixedPrecision(half, half, half, _module_classes_to_ignore=[_BatchNorm, nn.LayerNorm])
        with pytest.warns(UserWarning, match="wrapped by themselves"):
            model = FSDP(
                module,
                auto_wrap_policy=lambda *args, **kwargs: False,
                mixed_precision=config,
                use_orig_params=originals,
            )
        for norm in (model.module.bn, model.module.ln):
            assert isinstance(norm, FSDP) and norm.mixed_precision == MixedPrecision()
        for layer in (model.module.fc1, model.module.fc2, model.module.fc3):
            assert not isinstance(layer, FSDP)
        assert model.mixed_precision is config
        if not convert:
            model(torch.randn(3, 4, 40)).sum().backward()
            assert set(model.module.seen.values()) == {half}
            assert model.module.bn.module.running_mean.dtype == single


@world(2)
def test_eval_root_cast_inputs() -> None:
    """D-72: a root without parameters in eval mode; backward works there."""

    class Root(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, expected: torch.dtype) -> Tensor:
            assert x.dtype == expected
            return self.inner(x)

    for switch in (True, False):
        with full_precision_in_eval(switch):
            config = MixedPrecision(half, single, single)
            model = FSDP(Root(FSDP(nn.Linear(10, 10), mixed_precision=config)), mixed_precision=config).eval()
        for _ in range(3):
            model(torch.randn(1, 10), single if switch else half).sum().backward()
            assert all(each.grad is None or each.grad.dtype == single for each in model.parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2)
def test_full_precision_in_eval(originals: bool) -> None:
    """D-73: train in fp16; eval in fp32 if the switch is on."""
    for switch, cast in itertools.product((True, False), (True, False)):
        with full_precision_in_eval(switch):
            config = MixedPrecision(half, half, half, cast_forward_inputs=cast)
            model = FSDP(Tokens(), mixed_precision=config, use_orig_params=originals)
        loss = model.module.loss(model(*model.module.batch()))
        assert loss.dtype == half
        loss.backward()
        assert all(each.grad is None or each.grad.dtype == single for each in model.parameters())
        model.eval()
        assert model.module.loss(model(*model.module.batch())).dtype == (single if switch else half)
        model.train()
        loss = model.module.loss(model(*model.module.batch()))
        assert loss.dtype == half
        loss.backward()


@world(2)
def test_full_precision_in_eval_buffers() -> None:
    """D-74: buffers follow, and every submodule's hooks see them so already."""
    for switch in (True, False):
        with full_precision_in_eval(switch):
            config = MixedPrecision(half, half, half)
            model = nested(single, mixed_precision=config)
        train = partial(model, (torch.randn(3, 10), model, config))
        train()
        assert all(buffer.dtype == half for buffer in model.buffers())
        model.eval()
        expected, seen = double if switch else half, []

        def look(module: nn.Module, args: Any, seen: list = seen) -> None:
            seen.extend(buffer.dtype for buffer in module.buffers())

        hooks = [each.register_forward_pre_hook(look) for each in model.modules() if each is not model]
        in_eval = MixedPrecision(buffer_dtype=None if switch else half, param_dtype=None if switch else half)
        model((torch.randn(3, 10), model, in_eval))
        assert seen and set(seen) == {expected}
        for hook in hooks:
            hook.remove()
        model.train()
        train()
        assert all(buffer.dtype == half for buffer in model.buffers())


@world(2)
def test_full_precision_in_eval_comm() -> None:
    """D-75, D-12: the reduction too."""
    for switch, originals in itertools.product((True, False), (True, False)):
        with full_precision_in_eval(switch):
            config = MixedPrecision(single, half, single, _module_classes_to_ignore=[])
            model = FSDP(
                Pair(mixed_precision=config, use_orig_params=originals),
                mixed_precision=config,
                use_orig_params=originals,
            )
        for training in (False, True, False):
            model.train(training)
            loss = model(torch.randn(2, 10)).sum()
            with Collectives() as recorder:
                loss.backward()
            assert reduces_in(recorder) == ({single} if switch and not training else {half})
            assert all(each.grad is None or each.grad.dtype == single for each in model.parameters())


@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD], ids=lambda each: each.name)
@world(2)
def test_input_grads_with_param_mixed_precision(strategy: ShardingStrategy) -> None:
    """D-76: an fp32 input has an fp32 gradient."""
    for originals in (False, True):
        config = MixedPrecision(param_dtype=half, reduce_dtype=single)
        options = {"mixed_precision": config, "use_orig_params": originals, "sharding_strategy": strategy}
        model = quietly(FSDP, nn.Linear(64, 64), **options)
        x = torch.randn(2, 64, requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None and x.grad.dtype == single


class NonLearnableConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(1, 1, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight)


@world(2)
def test_buffer_dtype_no_root_handle() -> None:
    """D-77: units that have nothing but buffers cast them."""
    options = {"mixed_precision": MixedPrecision(half, half, half), "use_orig_params": True}
    model = nn.Sequential(
        FSDP(nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU()), **options),
        FSDP(nn.Sequential(NonLearnableConv(), nn.ReLU()), **options),
        FSDP(nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten()), **options),
    )
    wrapped = FSDP(model, **options)
    assert wrapped.params == [] and wrapped.module[1].params == []
    output = wrapped(torch.randn(2, 1, 12, 12))
    assert output.dtype == half and model[1].module[0].weight.dtype == half
    output.sum().backward()


@world(1)
def test_mixed_precision_with_ignored_module() -> None:
    """D-78: it keeps its fp32 weights and gets fp16 inputs."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8))
    ignored = [model[1]]
    wrapped = quietly(FSDP, model, ignored_modules=ignored, mixed_precision=MixedPrecision(param_dtype=half))
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        wrapped(torch.randn(2, 8))


class Recorded(nn.Module):
    """FX-01: children c1 and c2; each keeps the input it got, in a dict by module."""

    class Child(nn.Module):
        def __init__(self, seen: dict, cast: bool) -> None:
            super().__init__()
            self.l, self.seen, self.cast = nn.Linear(100, 100), seen, cast

        def forward(self, x: Tensor) -> Tensor:
            self.seen[self] = x
            return self.l(x.to(self.l.weight.dtype) if self.cast else x)

    def __init__(self, cast: bool = False) -> None:
        super().__init__()
        self.seen: dict[nn.Module, Tensor] = {}
        self.c1, self.c2 = self.Child(self.seen, cast), self.Child(self.seen, cast)

    def forward(self, x: Tensor) -> Tensor:
        self.seen[self] = x
        return self.c2(self.c1(x))

    def dtypes(self, *modules: nn.Module) -> tuple[torch.dtype, ...]:
        return tuple(self.seen[each].dtype for each in modules)


@world(2)
def test_float16_on_one_submodule() -> None:
    """D-79, D-80, D-82, D-81, D-83: each unit casts its own inputs, if its policy says so."""
    x = torch.zeros(2, 100)
    casting = MixedPrecision(param_dtype=half, cast_forward_inputs=True)

    def build(cast: bool, c1: Any = None, c2: Any = None, root: Any = None) -> tuple[FSDP, Recorded, Any, Any]:
        model = Recorded(cast)
        one, two = model.c1, model.c2
        if c1 is not None:
            model.c1 = FSDP(one, mixed_precision=c1)
        if c2 is not None:
            model.c2 = FSDP(two, mixed_precision=c2)
        return FSDP(model, mixed_precision=root), model, one, two

    fsdp, model, c1, c2 = build(False, c2=casting)  # D-79
    fsdp(x).sum().backward()
    assert model.dtypes(model, c1, c2) == (single, single, half)
    fsdp, model, c1, c2 = build(True, c2=MixedPrecision(param_dtype=half))  # D-80
    fsdp(x).sum().backward()
    assert model.dtypes(model, c1, c2) == (single, single, single)
    fsdp, *_ = build(False, c2=MixedPrecision(param_dtype=half))  # D-81
    with pytest.raises(RuntimeError, match="mat1 and mat2 must have the same dtype"):
        fsdp(x)
    root = MixedPrecision(param_dtype=single, cast_forward_inputs=True)
    fsdp, model, c1, c2 = build(False, c2=casting, root=root)  # D-82
    fsdp(x).sum().backward()
    assert model.dtypes(model, c1, c2) == (single, single, half)
    fsdp, *_ = build(False, c1=casting, root=root)  # D-83
    with pytest.raises(RuntimeError, match="mat1 and mat2 must have the same dtype"):
        fsdp(x)


@world(2)
def test_root_casts_d07_d08() -> None:
    """D-07, D-08, D-09: the root by its own flag; by the other one only if it has parameters."""
    x, tokens = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)

    class Look(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.seen = inner, ()

        def forward(self, x: Tensor, *, nested: dict[str, list[Tensor]]) -> Tensor:
            self.seen = (x.dtype, nested["a"][0].dtype, nested["a"][1].dtype)
            return self.inner(x.to(half))

    for has, root, own in itertools.product((True, False), repeat=3):
        config = MixedPrecision(param_dtype=half, cast_root_forward_inputs=root, cast_forward_inputs=own)
        inner = nn.Linear(4, 4)
        model = FSDP(Look(inner if has else FSDP(inner, mixed_precision=config)), mixed_precision=config)
        model(x, nested={"a": [x, tokens]})
        expected = half if root or (own and has) else single
        assert model.module.seen == (expected, expected, torch.int64), (has, root, own)


@world(2)
def test_submodules_with_external_inputs() -> None:
    """D-84: what is made inside the root and given to a unit stays as it is."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.seen = nn.Linear(100, 100), ()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.seen = x.dtype, y.dtype
            return self.l(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l1, self.l2, self.seen = nn.Linear(100, 100), Inner(), None

        def forward(self, x: Tensor) -> Tensor:
            self.seen = x.dtype
            return self.l2(self.l1(x), torch.ones(2, 100))

    model, config = Outer(), MixedPrecision(param_dtype=half)
    inner = model.l2
    model.l2 = FSDP(inner, mixed_precision=config)
    FSDP(model, mixed_precision=config)(torch.zeros(2, 100)).sum().backward()
    assert (model.seen, inner.seen) == (half, (half, single))


class WithAverage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 2))
        self.ema = AveragedModel(self.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) if self.training else self.ema(x)


@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD], ids=lambda each: each.name)
@world(2)
def test_train_ema_eval_flow(strategy: ShardingStrategy) -> None:
    """D-85, D-13: what is written under `summon_full_params` is what the next forward computes with."""
    for originals in (False, True):
        torch.manual_seed(0)
        model = quietly(
            FSDP,
            WithAverage(),
            auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
            mixed_precision=MixedPrecision(param_dtype=half),
            sharding_strategy=strategy,
            use_orig_params=originals,
        )
        optimizer = torch.optim.Adam(model.module.module.parameters(), lr=0.1)
        x = torch.randn(2, 8)
        outputs = []
        for _ in range(3):
            model.train()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with FSDP.summon_full_params(model):
                model.module.ema.update_parameters(model.module.module)
            model.eval()
            with torch.no_grad():
                outputs.append(model(x))
        assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2)
def test_a_forward_without_backward_does_not_lose_the_reduction(originals: bool) -> None:
    """F1-69: the quirk is not copied."""
    config = MixedPrecision(param_dtype=half, reduce_dtype=single)
    model = FSDP(nn.Linear(4, 4), mixed_precision=config, use_orig_params=originals)
    x = torch.full((1, 4), float(dist.get_rank() + 1))
    model(x)
    model(x).sum().backward()
    gradient = model.params[0].grad
    assert gradient.shape == model.params[0].shape
    assert {1.5} >= set(gradient[: 8 if dist.get_rank() == 0 else 6].tolist())
