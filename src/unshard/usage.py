"""Help texts of the command `unshard`. This module imports nothing, so that `unshard --help` answers at once."""

COMMANDS = """usage: unshard COMMAND [arguments]
       unshard --version

run          run a program for torch.distributed.fsdp on unshard, without editing it
checkpoint   verify, inspect or compare checkpoints
export       write the model of a checkpoint as safetensors files

`unshard COMMAND --help` says more."""

RUN = """usage: unshard run script.py [arguments]
       unshard run -m module [arguments]
       unshard run --nproc-per-node 8 [other options of torchrun] script.py [arguments]

Runs a program as Python itself would, with torch.distributed.fsdp replaced by unshard. With options of torchrun it
starts that many processes, as torchrun does. When the program ends, rank 0 says how many units were sharded."""

CHECKPOINT = """usage: unshard checkpoint verify PATH
       unshard checkpoint inspect PATH
       unshard checkpoint diff PATH PATH

PATH is a checkpoint that unshard.checkpoint.save wrote, or the folder with several, of which the latest is taken.
verify reads all of it and compares all checksums; the exit status is 1 if it is damaged. inspect prints a table of its
tensors. diff prints what differs between two; the exit status is 0 if they are equal, else 1. None of them needs the
other ranks or a GPU."""

EXPORT = """usage: unshard export CHECKPOINT FOLDER [--dtype DTYPE] [--max-file-size SIZE] [--prefix PREFIX]
                      [--tied-name NAME]... [--overwrite]

Writes the model of a checkpoint as safetensors files. --dtype: of floating-point tensors, such as bfloat16.
--max-file-size: such as 5GB, which is the default. --prefix: put before all names. --tied-name: the name to write a
tied tensor under, instead of the first one. --overwrite: replace the files of an earlier export."""
