"""The test bed: many ranks in a few processes, one rank of an imagined job, and tools that measure instead of trust.

pool              worker processes, started once and used by every test
processes         `pytest --processes 2`: tests of several files at once
world             `@world(1, 2, 4)`: run a test body on that many ranks
quick             which rows of a test are quick
models            five small models that between them hold every awkward parameter
parity            sharded training against the same model unsharded
peer              PyTorch's own fully_shard, to compare with
recorders         which collectives and which operations ran
loopback          one rank of a job whose other ranks do not exist
loopback_stream   when its collectives read and write: at the worst moments allowed
simulated         training as one rank of such a job

and models with their helpers, for tests of the same kind:

stack             residual blocks under `fully_shard`; at rest, gradients, meshes
module_lists      a list of modules as one unit
branches          blocks that each rank may run in its own order
precision_model   norms, an embedding and buffers, for reports about dtypes
wrapped           models under `FullyShardedDataParallel`
flat_optimizers   optimizers on flat shards, and the same ones on copies
tensor_subclass   a tensor with its own all-gather protocol
user_collectives  all-gathers and reduce-scatters of a user
runs              runs of all kinds, to save and resume
damage            damaged and hostile checkpoints
checkpoints       what saving a checkpoint warns about
programs          Python programs in processes of their own
hosts             several hosts on one machine: namespaces with a network, a hostname and a disk of their own
training          a program that trains on hosts
late              side streams that run their work as late as they may
cuda              training on a CUDA device, and the transports of a test's choice
"""

from bed.world import world

__all__ = ["world"]
