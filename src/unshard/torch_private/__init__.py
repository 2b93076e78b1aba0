"""All private torch APIs that this library uses.

If a docstring gives no other reason, torch has no public API for the purpose. If a docstring names no versions, all
supported versions (2.11 to 2.15) have the private API. This was checked with torch 2.11 (CUDA), 2.13 and 2.15 (CPU).
"""

from . import versions as versions  # first: checks the version before anything else can fail
from .autograd import *
from .distributed import *
from .optimizers import *
from .tensors import *
from .virtual import *
