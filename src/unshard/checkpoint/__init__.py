"""Checkpoints of a run: model, optimizer, scheduler, scaler, data and random numbers, between any numbers of ranks.

boxes parts                    which part of a tensor a rank holds; integers and views
model_state optimizer_state    what this rank holds of a model and its optimizer, by name
values rng                     everything else, as JSON
checksums manifest files       the format
folders                        published checkpoints, saves under way, leftovers
plan save                      which rank writes what, and publishing it
host_buffers staging           copies in host memory
background saver               saving while training goes on
differences optimizer_load load
reports                        `verify` and `inspect`
pieces diff                    tensors piece by piece, and what differs between two checkpoints
observed prove_resume          all that a run holds, and a proof that it resumes
safetensors_format export safetensors_load    files for, and from, other programs
"""

from ..errors import CheckpointError
from .diff import diff
from .export import export
from .folders import latest
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
    "inspect",
    "latest",
    "load",
    "load_safetensors",
    "prove_resume",
    "save",
    "verify",
]
