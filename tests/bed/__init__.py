"""The test bed: many ranks in a few processes, one rank of an imagined job, and tools that measure instead of trust.

pool        worker processes, started once and used by every test
world       `@world(1, 2, 4)`: run a test body on that many ranks
models      five small models that between them hold every awkward parameter
parity      sharded training against the same model unsharded
peer        PyTorch's own fully_shard, to compare with
recorders   which collectives and which operations ran
loopback    one rank of a job whose other ranks do not exist
lane        when its collectives read and write: at the worst moments allowed
simulated   training as one rank of such a job
"""

from bed.world import world

__all__ = ["world"]
