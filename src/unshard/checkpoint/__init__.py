"""Checkpoints of a run: model, optimizer, scheduler, scaler, data and random numbers, between any numbers of ranks.

boxes parts                    which part of a tensor a rank holds; integers and views
model_state optimizer_state    what this rank holds of a model and its optimizer, by name
values rng                     everything else, as JSON
checksums manifest files       the format
folders                        published checkpoints, saves in progress, leftovers
plan save                      which rank writes what, and publishing it
host_buffers staging           copies in host memory
background saver               saving while training goes on
differences optimizer_load load
full_tensors                   unsharded tensors one at a time, to and from rank 0
full_state_dict full_optimizer_state_dict    state dicts of the unsharded model and its optimizer
reports                        `verify` and `inspect`
pieces diff                    tensors piece by piece, and what differs between two checkpoints
observed prove_resume          all that a run holds, and a proof that it resumes
safetensors_format export safetensors_load    files for, and from, other programs
"""

from ..errors import CheckpointError
from .diff import diff
from .export import export
from .folders import latest
from .full_optimizer_state_dict import full_optimizer_state_dict, load_full_optimizer_state_dict
from .full_state_dict import full_state_dict, load_full_state_dict
from .load import load
from .prove_resume import ResumeReport, prove_resume
from .reports import inspect, verify
from .safetensors_load import load_safetensors
from .save import save
from .saver import Saver

__all__ = [
    "CheckpointError",
    "ResumeReport",
    "Saver",
    "diff",
    "export",
    "full_optimizer_state_dict",
    "full_state_dict",
    "inspect",
    "latest",
    "load",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_safetensors",
    "prove_resume",
    "save",
    "verify",
]
