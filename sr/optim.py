"""Muon for convolutions: matrices are moved by orthogonal steps, everything else by Adam.

Of one shape there are many matrices in an SR network, and all of them are orthogonalised in one batched product, which
on a CPU takes a quarter of the time or less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from sr.errors import SRError

# Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024): five steps of
# x -> a x + b (x x^T) x + c (x x^T)^2 x bring singular values from (0, 1] to about 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def orthogonalise(x: Tensor) -> Tensor:
    """The nearest matrices with orthonormal rows (or columns, if there are fewer), approximately.

    Singular values come out between about 0.7 and 1.2.

    Args:
        x: (N, rows, columns), computed in its own type.

    Returns:
        (N, rows, columns)
    """
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    a, b, c = _QUINTIC
    for _ in range(_STEPS):
        square = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, for weights of two dimensions and more; Adam with the same rate for the rest.

    A convolution's weight counts as a matrix (out, in * height * width). An orthogonal step is scaled by
    ``0.2 * sqrt(max(rows, columns))``, so that its entries are as large as Adam's and rates can be carried over
    (Liu et al., "Muon is scalable for LLM training", arXiv:2502.16982).

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        momentum: share of the former direction in the new one.
        betas: Adam's, for biases and other vectors.
        eps: Adam's.
        weight_decay: decoupled: weights shrink by ``lr * weight_decay`` in a step; not applied to vectors.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 5e-4,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value in {"momentum": momentum, "betas[0]": betas[0], "betas[1]": betas[1]}.items():
            if not 0 <= value < 1:
                raise SRError(f"{name} lies in [0, 1), not {value}")
        params = list(params)
        if any(hasattr(p, "placements") for p in params):  # a DTensor: part of the matrix is elsewhere
            raise SRError("Muon moves whole matrices; train sharded weights with torch.optim.AdamW")
        if lr < 0 or weight_decay < 0:
            raise SRError(f"lr and weight_decay are not negative; here {lr} and {weight_decay}")
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; ``closure`` computes the loss again, with its gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            matrices: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.ndim > 1:
                    matrices[p.shape[0], p.shape[1:].numel()].append(p)
                else:
                    self._adam(p, group)
            for shape, same in matrices.items():
                self._muon(same, shape, group)
        return loss

    def _muon(self, params: list[Tensor], shape: tuple[int, int], group: dict[str, Any]) -> None:
        for p in params:
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            state["momentum"].lerp_(p.grad, 1 - group["momentum"])
        direction = torch.stack([self.state[p]["momentum"].reshape(shape) for p in params])
        if direction.is_cuda:
            direction = direction.bfloat16()  # as published; on a CPU products this small are slower in bfloat16
        direction = orthogonalise(direction)
        rate = group["lr"] * 0.2 * max(shape) ** 0.5
        for p, update in zip(params, direction, strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(update.view(p.shape), alpha=-rate)

    def _adam(self, p: Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        step = float(state["step"])
        state["exp_avg"].lerp_(p.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        scale = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        p.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / (1 - beta1**step))
