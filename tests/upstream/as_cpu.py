"""Imports test files that PyTorch wrote for GPUs as if the CPU were an accelerator. Changes only the copy in memory.

PyTorch skips most tests of FSDP on a machine without GPUs. Only a test that passes with PyTorch's own FSDP under this
substitution says something about unshard, so the substitution need not be perfect.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType
from typing import Any

GATE = re.compile(r"gpu|cuda|nccl|accelerator|multicast", re.IGNORECASE)
"""Decorators with such a word skip a test on a machine without GPUs."""


class Substitute(ast.NodeTransformer):
    """Reads "cuda" as "cpu", "nccl" as "gloo" and `torch.cuda` as `torch.cpu`. Drops the decorators that need a GPU."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        text = node.value
        if isinstance(text, str) and re.fullmatch(r"(cuda|nccl)(:\d+)?", text):
            return ast.copy_location(ast.Constant("cpu" if text.startswith("cuda") else "gloo"), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node) == "torch.cuda":
            node.attr = "cpu"
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = ast.unparse(node.func)
        if name.endswith(".cuda"):
            node.func, node.args, node.keywords = ast.Attribute(node.func.value, "cpu", ast.Load()), [], []  # type: ignore[attr-defined]
        elif name == "torch.device" and len(node.args) == 2:
            node.args.pop()  # cpu:0 is another device than cpu
        node.keywords = [each for each in node.keywords if each.arg != "device_ids"]  # DDP takes none on the CPU
        return ast.fix_missing_locations(node)

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        node.decorator_list = [each for each in node.decorator_list if not GATE.search(ast.unparse(each))]
        return self.generic_visit(node)

    visit_ClassDef = visit_FunctionDef


class Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path), self.path)
        return compile(Substitute().visit(tree), self.path, "exec", dont_inherit=True)


class Finder(MetaPathFinder):
    """Finds modules in the folder of the test file, before installed ones of the same name."""

    def __init__(self, folder: str):
        self.folder = folder

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        file = os.path.join(self.folder, *name.split(".")) + ".py"
        return spec_from_file_location(name, file, loader=Loader(name, file)) if os.path.exists(file) else None


def pretend(folder: str, devices: int) -> None:
    """Make the CPU look like `devices` accelerators to PyTorch's tests, and start ranks by fork, which is faster."""
    import torch

    for owner in (torch.accelerator, torch.cpu):
        owner.device_count = lambda: devices
    torch.cpu.current_device = lambda: torch.device("cpu")
    torch.cpu.manual_seed = torch.manual_seed
    for name in ("_sleep", "set_device", "empty_cache"):
        setattr(torch.cpu, name, lambda *args: None)
    context = torch.multiprocessing.get_context
    torch.multiprocessing.get_context = lambda method=None: context("fork")
    torch.multiprocessing.set_start_method = lambda *args, **kwargs: None

    from torch.testing._internal import common_fsdp

    common_fsdp.DEVICE_COUNT = devices
    if hasattr(common_fsdp, "FSDPTestContinuous"):
        common_fsdp.FSDPTestContinuous.world_size = devices
    sys.meta_path.insert(0, Finder(folder))


def let_torch_use_the_cpu() -> None:
    """Give PyTorch's FSDP1 the device that it would otherwise require. unshard needs no such help."""
    import torch
    from torch.distributed.fsdp import _init_utils, fully_sharded_data_parallel

    choose = _init_utils._init_device_handle
    fully_sharded_data_parallel._init_device_handle = lambda state, module, ignored, device: choose(
        state, module, ignored, device or torch.device("cpu")
    )
    _init_utils._check_module_states_for_sync_module_states = lambda module: None
