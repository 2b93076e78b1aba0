"""Checkpoints of a run: model, optimizer, scheduler, scaler, data and random numbers, with any number of ranks.

values plan                    state as JSON; which rank writes which box
storage manifest files         the file system; the format; data files
folders                        published checkpoints, saves in progress, leftovers
ranks                          work that all ranks do together
save                           writing and publishing
host_buffers saver             saving in the background
matching                       comparing any source of tensors with a model
load optimizer                 loading; saving and loading optimizer state
full_tensors full_state_dict full_optimizer_state_dict    unsharded tensors, to and from rank 0
safetensors export             loading and writing safetensors files
reports                        `verify`, `inspect` and `diff`
unsaved prove_resume           a proof that a run resumes
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
