"""Function transforms over a model, each of which gives one tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.autograd import forward_ad


def dual(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The tangent of the output, by dual numbers."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def vjp(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output, product = torch.func.vjp(model, x)
    return product(torch.ones_like(output))[0]


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "vjp": vjp,
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "dual": dual,
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x[0]),
    "gradients of samples": lambda model, x: torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x),
}


def linearized(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.linearize(model, x)[1](torch.ones_like(x))


def called_with(parameters: dict[str, torch.Tensor], model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(model, parameters, (x,))
