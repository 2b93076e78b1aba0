"""TRL: the SFTTrainer with packing off, on tokens that are given."""

import os
import sys

import torch
from datasets import Dataset
from outcome import batches, let_accelerate_shard_on_the_cpu, llama, write
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

let_accelerate_shard_on_the_cpu()
words = {f"w{number}": number for number in range(32)}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w1", eos_token="w2"
)
tokens = torch.stack(batches(0, 16)).flatten(0, 1)
arguments = SFTConfig(
    output_dir=os.path.join(sys.argv[1], "run"),
    use_cpu=True,
    accelerator_config={"use_configured_state": True},
    bf16=True,
    fsdp="full_shard auto_wrap",
    fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    per_device_train_batch_size=2,
    gradient_checkpointing=False,
    max_steps=4,
    save_strategy="no",
    logging_steps=1,
    learning_rate=1e-2,
    report_to=[],
    disable_tqdm=True,
)
data = Dataset.from_dict({"input_ids": tokens.tolist()})
trainer = SFTTrainer(llama(), arguments, train_dataset=data, processing_class=tokenizer)
trainer.train()
write("trl", trainer.model_wrapped, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
