"""torchao: a kind of training whose weights have a gather protocol, chosen by the second argument."""

import sys

import torch
import torch.distributed as dist
from outcome import Model, batches, loss_of, write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

kind = sys.argv[2]
torch.manual_seed(0)
model = Model(width=32)
if kind == "float8":
    from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, cast_config_input=CastConfig(), emulate=True)
    convert_to_float8_training(model.blocks, config=config)
else:
    from torchao.prototype.quantized_training import int8_mixed_precision_training, int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    kinds = {"int8": int8_weight_only_quantized_training, "int8-mixed": int8_mixed_precision_training}
    quantize_(model.blocks, kinds[kind]())
mesh = init_device_mesh("cpu", (2,))
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
for block in model.blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if kind == "int8":  # its weights have no operators for AdamW
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
losses = []
for tokens in batches(dist.get_rank(), 5):
    loss = loss_of(model, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if kind == "float8":
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)
    losses.append(loss.item())
write("torchao", model, losses)
dist.destroy_process_group()
