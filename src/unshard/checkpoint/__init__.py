"""Checkpoints of a run: model, optimizer, scheduler, scaler, data and random numbers, between any numbers of ranks.

optimizer_state                what this rank holds of an optimizer, by name
values                         everything else, as JSON
plan                           which rank writes which box
manifest files                 the format
folders                        published checkpoints, saves in progress, leftovers
save                           writing and publishing
host_buffers saver             saving while training goes on
differences optimizer_load load
full_tensors                   unsharded tensors one at a time, to and from rank 0
full_state_dict full_optimizer_state_dict    state dicts of the unsharded model and its optimizer
reports                        `verify`, `inspect` and `diff`
observed prove_resume          all that a run holds, and a proof that it resumes
safetensors export             files from, and for, other programs
"""

from ..errors import CheckpointError
from .export import export
from .folders import latest
from .full_optimizer_state_dict import full_optimizer_state_dict, load_full_optimizer_state_dict
from .full_state_dict import full_state_dict, load_full_state_dict
from .load import load
from .prove_resume import ResumeReport, prove_resume
from .reports import diff, inspect, verify
from .safetensors import load_safetensors
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
