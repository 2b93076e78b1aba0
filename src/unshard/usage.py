"""Help texts of the `unshard` command. This module imports nothing, so that `unshard --help` is immediate."""

COMMANDS = """usage: unshard COMMAND [arguments]
       unshard --version

run          run a program written for torch.distributed.fsdp on unshard, without editing it
checkpoint   verify, inspect or compare checkpoints
export       write the model of a checkpoint as safetensors files

See `unshard COMMAND --help` for details."""

RUN = """usage: unshard run script.py [arguments]
       unshard run -m module [arguments]
       unshard run --nproc-per-node 8 [other torchrun options] script.py [arguments]

Runs a Python program with torch.distributed.fsdp replaced by unshard. With torchrun options, it starts processes as
torchrun does. When the program ends, rank 0 prints how many units were sharded."""

CHECKPOINT = """usage: unshard checkpoint verify PATH
       unshard checkpoint inspect PATH
       unshard checkpoint diff PATH PATH

PATH is a checkpoint written by unshard.checkpoint.save, or a folder of several checkpoints (uses the latest).

verify    read everything and compare all checksums; the exit status is 1 if the checkpoint is damaged
inspect   print a table of the tensors
diff      print the differences between two checkpoints; the exit status is 0 if they are equal, else 1

These commands run in one process and need no GPU."""

EXPORT = """usage: unshard export CHECKPOINT FOLDER [--dtype DTYPE] [--max-file-size SIZE] [--prefix PREFIX]
                      [--tied-name NAME]... [--overwrite]

Writes the model of a checkpoint as safetensors files.

--dtype           convert floating-point tensors, for example to bfloat16
--max-file-size   for example 5GB (the default)
--prefix          prepend this to all names
--tied-name       name to write a tied tensor under, instead of its first name
--overwrite       replace the files of an earlier export"""
