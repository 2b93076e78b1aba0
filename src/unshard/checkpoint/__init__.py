"""Saves a training run and loads it on any number of ranks.

A checkpoint contains the state of the model, optimizer, scheduler, scaler, data and random number generators.

values                      converts state to JSON and back
storage                     wraps the file system calls
manifest, files             define the format, and read and write data files
folders                     names, publishes and deletes checkpoint folders
ranks                       runs work on all ranks, and collects the mismatches that ranks find
save                        plans which rank writes which box, writes the files and publishes the checkpoint
host_buffers, saver         save in the background
load                        compares tensors with a model and loads them
optimizer                   saves and loads optimizer state
full_state_dict, full_optimizer_state_dict    gather unsharded tensors on rank 0 and load them from there
safetensors                 loads and writes safetensors files
reports                     reports on checkpoints (`verify`, `inspect`, `diff`)
prove_resume                checks that a run resumes bitwise
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
