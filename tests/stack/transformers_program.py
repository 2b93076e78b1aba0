"""transformers: the Trainer with `fsdp=`, a checkpoint in the middle, and a second Trainer that resumes from it."""

import os
import sys
from pathlib import Path

import torch
from outcome import batches, let_accelerate_shard_on_the_cpu, llama, write
from transformers import Trainer, TrainingArguments

version = int(sys.argv[2])
let_accelerate_shard_on_the_cpu()
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.stack(batches(0, 16)).flatten(0, 1)]


def trainer(steps: int) -> Trainer:
    arguments = TrainingArguments(
        output_dir=os.path.join(sys.argv[1], "run"),
        use_cpu=True,
        accelerator_config={"use_configured_state": True},
        bf16=True,
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "fsdp_version": version,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
            "sync_module_states": False,  # accelerate does that only on accelerators
        },
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=steps,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
    )
    return Trainer(llama(), arguments, train_dataset=data)


def losses(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


straight = trainer(4)
straight.train()
resumed = trainer(4)
resumed.train(resume_from_checkpoint=str(Path(sys.argv[1], "run", "checkpoint-2")))
norms = [entry["grad_norm"] for entry in straight.state.log_history if "grad_norm" in entry]
write("transformers", resumed.model_wrapped, losses(straight) + norms, resumed=losses(resumed) == losses(straight))
