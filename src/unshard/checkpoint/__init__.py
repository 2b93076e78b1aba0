"""Checkpoints of a run: model, optimizer, scheduler, scaler, data and random numbers, for any number of ranks.

values                         state as JSON
storage manifest files         the file system; the format; data files
folders                        published checkpoints, saves in progress, leftovers
ranks                          work that all ranks do together; mismatches that any rank finds
save                           the plan (which rank writes which box), writing and publishing
host_buffers saver             saving in the background
load                           comparing tensors with a model; loading
optimizer                      saving and loading optimizer state
full_state_dict full_optimizer_state_dict    unsharded tensors, to and from rank 0
safetensors                    loading and writing safetensors files
reports                        `verify`, `inspect`, `diff` and the report of `prove_resume`
prove_resume                   a proof that a run resumes
"""

from ..errors import CheckpointError
from .folders import latest
from .full_optimizer_state_dict import full_optimizer_state_dict, load_full_optimizer_state_dict
from .full_state_dict import full_state_dict, load_full_state_dict
from .load import load
from .prove_resume import prove_resume
from .reports import ResumeReport, diff, inspect, verify
from .safetensors import export, load_safetensors
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
