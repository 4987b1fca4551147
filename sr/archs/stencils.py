"""3x3 stencils whose cost is memory traffic: eager forms that stay in cache, and the same source compiled.

A stencil here reads a map that already carries a border of one pixel and returns a map without it, so that no
load needs a mask (a compiled stencil that pads on the fly runs three times slower). Each is written once, as a
sum of shifted products. Eager PyTorch runs it a few channels at a time, so that the temporaries stay in the
cache; ``torch.compile`` turns it into one loop that reads the map once and stores nothing but the result.
Backward passes are written out: the ones that automatic differentiation finds store every shifted product when eager
and run four times slower when compiled.

Compiling takes 10 to 30 seconds per process (less once the inductor's disk cache knows the kernels), so that a single
small picture is better off without. ``compile_kernels`` decides:

* ``None`` (default): eager until this process has put ``WARM_UP`` elements through the stencils, which takes about as
  long as compiling does; compiled from then on. Results differ by rounding only.
* ``True``: compiled from the first call. ``False``: never.

Where compiling fails, for want of a C++ compiler or of Triton, the eager form serves, and one line in the log says so.
Under an outer ``torch.compile`` the plain source is traced, never a compiled kernel; exports get plain convolutions.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_log = logging.getLogger(__name__)

compile_kernels: bool | None = None
WARM_UP = 2**31
_CACHED_ELEMENTS = 2**17  # elements of one map that an eager stencil works on at a time: 0.5 MB, a few of which fit L2


class _State:
    """What this process has learnt: how much work it has done, and whether compiling works here."""

    elements = 0
    broken = False


def tracing() -> bool:
    """Whether a graph is being recorded, by ``torch.compile``, ``torch.export`` or the older tracer."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _exporting() -> bool:
    # is_exporting came with torch 2.7; before, a compilation counts as an export, and loses the custom backward only.
    recording = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
    return recording() or torch.jit.is_tracing()


class _Kernel:
    """A stencil in both forms. Maps are (N, C, h, w), weights (C, ...); channels do not mix; it returns a tuple."""

    def __init__(self, source: Callable[..., tuple[Tensor, ...]]) -> None:
        self.source = source
        self.compiled: Callable[..., tuple[Tensor, ...]] | None = None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if tracing():
            return self.source(*tensors)
        _State.elements += tensors[0].numel()
        wanted = _State.elements > WARM_UP if compile_kernels is None else compile_kernels
        if not wanted or _State.broken:
            return self._eager(*tensors)
        try:
            if self.compiled is None:
                self.compiled = torch.compile(self.source, dynamic=True, fullgraph=True)
            return self.compiled(*tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            result = self._eager(*tensors)  # what is wrong with the tensors themselves is raised here again
            _State.broken = True
            reason = str(error).strip().splitlines()[:1]
            _log.warning("torch.compile does not work here, so slower eager kernels serve: %s", *reason or ["unknown"])
            return result

    def _eager(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        n, channels, h, w = tensors[0].shape
        if tensors[0].device.type != "cpu":  # a GPU prefers few and large launches
            return self.source(*tensors)
        few = max(1, _CACHED_ELEMENTS // max(1, n * h * w))
        if few >= channels:
            return self.source(*tensors)
        parts = [
            self.source(*(t.narrow(int(t.dim() == 4), c, min(few, channels - c)) for t in tensors))
            for c in range(0, channels, few)
        ]
        return tuple(torch.cat(whole, int(whole[0].dim() == 4)) for whole in zip(*parts, strict=True))


def _shift(x: Tensor, i: int, j: int, short: int = 2) -> Tensor:
    """``x`` moved by (i, j), cut to the size of an output that is ``short`` pixels smaller on both axes."""
    return x[..., i : x.shape[-2] - short + i, j : x.shape[-1] - short + j]


def _per_channel(weight: Tensor) -> Tensor:
    return weight[..., None, None]


def _wide(x: Tensor) -> Tensor:
    """At least float32: products of half-precision maps are summed in float32, in registers when compiled."""
    return x if x.dtype == torch.float64 else x.float()


def _add(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    return a * b if total is None else total.addcmul_(a, b)


def _taps(x: Tensor, weight: Tensor) -> Tensor:
    """Depth-wise 3x3 convolution of (N, C, h+2, w+2) with weights (C, 9): (N, C, h, w)."""
    total = None
    for k in range(9):
        total = _add(total, _shift(x, k // 3, k % 3), _per_channel(weight[:, k]))
    assert total is not None
    return total


@_Kernel
def _depthwise(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (_taps(_wide(x), weight).to(x.dtype),)


# --- dynamic convolution: y = sum_k (sum_j w_kj x_j) x_k, with x_k the map shifted to the k-th of nine neighbours ----


@_Kernel
def _quadratic(x: Tensor, upper: Tensor) -> tuple[Tensor, ...]:
    """x (N, C, h+2, w+2) and the triangle ``upper`` (C, 9, 9) of the quadratic form: (N, C, h, w)."""
    wide, total = _wide(x), None
    near = [_shift(wide, k // 3, k % 3) for k in range(9)]
    for k in range(9):
        inner = None
        for j in range(k, 9):
            inner = _add(inner, near[j], _per_channel(upper[:, k, j]))
        assert inner is not None
        total = _add(total, inner, near[k])
    assert total is not None
    return (total.to(x.dtype),)


@_Kernel
def _quadratic_grad_input(grad: Tensor, x: Tensor, both: Tensor) -> tuple[Tensor, ...]:
    """dx(u) = sum_k grad(u - k) sum_j s_kj x(u - k + j), with s = w + w^T.

    grad (N, C, h+4, w+4) and x (N, C, h+6, w+6) carry two more pixels of zeros on each side: (N, C, h+2, w+2).
    """
    wide, far, total = _wide(x), _wide(grad), None
    for k in range(9):
        inner = None
        for j in range(9):
            at = _shift(wide, 2 - k // 3 + j // 3, 2 - k % 3 + j % 3, short=4)
            inner = _add(inner, at, _per_channel(both[:, k, j]))
        assert inner is not None
        total = _add(total, inner, _shift(far, 2 - k // 3, 2 - k % 3))
    assert total is not None
    return (total.to(x.dtype),)


@_Kernel
def _quadratic_grad_weight(grad: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Forty-five sums of grad x_k x_j, each (C,), for k <= j."""
    wide, out = _wide(x), []
    near = [_shift(wide, k // 3, k % 3) for k in range(9)]
    for k in range(9):
        product = near[k] * grad
        out += [(product * near[j]).sum((0, 2, 3)) for j in range(k, 9)]
    return tuple(out)


def _upper(weight: Tensor) -> Tensor:
    taps = _wide(weight).reshape(-1, 9, 9)
    return taps.triu() + taps.tril(-1).transpose(-1, -2)


class _DynamicConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _quadratic(x, _upper(weight))[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, dx, dw = grads[0].contiguous(), None, None
        if ctx.needs_input_grad[0]:
            upper = _upper(weight)
            dx = _quadratic_grad_input(F.pad(grad, (2,) * 4), F.pad(x, (2,) * 4), upper + upper.transpose(-1, -2))[0]
        if ctx.needs_input_grad[1]:
            sums = iter(_quadratic_grad_weight(grad, x))
            triangle = {(k, j): next(sums) for k in range(9) for j in range(k, 9)}
            full = [triangle[min(k, j), max(k, j)] for k in range(9) for j in range(9)]
            dw = torch.stack(full, 1).view_as(weight).to(weight.dtype)
        return dx, dw


def dynamic_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve each channel with the 3x3 filter that a depth-wise 3x3 convolution predicts from it, pixel by pixel.

    The nine predicted taps and the nine pixels they meet are the same 3x3 patch p of the channel, so the result is the
    quadratic form p^T W p: 45 different products, and no map of taps.

    Args:
        x: (N, C, H+2, W+2), any float type; the outer pixels are the border (zeros, for a picture padded with zeros).
        weight: (9*C, 1, 3, 3); row 9*c + k predicts tap k (row by row) of channel c.

    Returns:
        (N, C, H, W), of the type of ``x``, computed in float32 or better.
    """
    if not _exporting():
        return _DynamicConv.apply(x, weight)
    # Nine depth-wise convolutions: a fifth of the graph's nodes, and what other runtimes have fast kernels for.
    filters = _upper(weight).to(x.dtype).unflatten(2, (3, 3)).split(1, 1)
    products = [F.conv2d(x, f, groups=x.shape[1]) * _shift(x, k // 3, k % 3) for k, f in enumerate(filters)]
    return functools.reduce(torch.add, products)


# --- gated depth-wise convolution ------------------------------------------------------------------------------------


@_Kernel
def _gated(a: Tensor, b: Tensor, weight_a: Tensor, weight_b: Tensor) -> tuple[Tensor, ...]:
    gate = F.gelu(_taps(_wide(a), weight_a))
    return ((gate * _taps(_wide(b), weight_b)).to(a.dtype),)


@_Kernel
def _gated_grad(a: Tensor, b: Tensor, grad: Tensor, weight_a: Tensor, weight_b: Tensor) -> tuple[Tensor, ...]:
    """Gradients of both convolutions' outputs (N, C, h, w), then nine sums (C,) for each of the two weights."""
    wide_a, wide_b = _wide(a), _wide(b)
    out_a, out_b = _taps(wide_a, weight_a), _taps(wide_b, weight_b)
    normal = 0.5 * (1 + torch.erf(out_a * math.sqrt(0.5)))
    slope = normal + out_a * torch.exp(-0.5 * out_a * out_a) * (1 / math.sqrt(2 * math.pi))
    grad_a, grad_b = grad * out_b * slope, grad * out_a * normal
    sums = [
        (_shift(wide, k // 3, k % 3) * g).sum((0, 2, 3))
        for wide, g in ((wide_a, grad_a), (wide_b, grad_b))
        for k in range(9)
    ]
    return grad_a.to(a.dtype), grad_b.to(a.dtype), *sums


class _GatedConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _gated(*x.chunk(2, 1), *_halves(weight))[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_a, grad_b, *sums = _gated_grad(*x.chunk(2, 1), grads[0].contiguous(), *_halves(weight))
        # The transposed convolution is the convolution of the padded gradient with the filter turned by 180 degrees.
        flat = _wide(weight).flatten(1).flip(1)
        dx = _depthwise(F.pad(torch.cat((grad_a, grad_b), 1), (2,) * 4), flat)[0] if ctx.needs_input_grad[0] else None
        dw = torch.cat((torch.stack(sums[:9], 1), torch.stack(sums[9:], 1))).view_as(weight).to(weight.dtype)
        return dx, dw


def _halves(weight: Tensor) -> tuple[Tensor, ...]:
    return _wide(weight).flatten(1).chunk(2)


def gated_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Depth-wise 3x3 convolution, then GELU of the first half of the channels times the second half.

    Args:
        x: (N, 2*C, H+2, W+2), any float type, bordered as in :func:`dynamic_conv`.
        weight: (2*C, 1, 3, 3).

    Returns:
        (N, C, H, W), of the type of ``x``, computed in float32 or better.
    """
    if not _exporting():
        return _GatedConv.apply(x, weight)
    a, b = F.conv2d(x, weight, groups=x.shape[1]).chunk(2, 1)
    return F.gelu(a) * b


# --- layer normalisation over channels -------------------------------------------------------------------------------


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalised map, and 1 / standard deviation."""
    # Two means over the strided axis: torch.var_mean over it is twenty times slower on a CPU.
    centred = _wide(x)
    centred = centred - centred.mean(1, keepdim=True)
    inverse = torch.rsqrt((centred * centred).mean(1, keepdim=True) + eps)
    return centred * inverse, inverse


class _ChannelNorm(torch.autograd.Function):
    """Keeps only the input, which the residual connection holds anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _affine(x, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = _wide(grads[0])
        unit, inverse = _normalised(x, ctx.eps)
        inner = grad * _per_channel(_wide(weight))
        dx = inner - inner.mean(1, keepdim=True)
        dx = dx.addcmul_(unit, (inner * unit).mean(1, keepdim=True), value=-1).mul_(inverse)
        dw, db = (unit * grad).sum((0, 2, 3)), grad.sum((0, 2, 3))
        return dx.to(x.dtype), dw.to(weight.dtype), db.to(weight.dtype), None


def _affine(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    unit, _ = _normalised(x, eps)
    return torch.addcmul(_per_channel(_wide(bias)), unit, _per_channel(_wide(weight))).to(x.dtype)


def channel_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Layer normalisation over the channels of each pixel of ``x`` (N, C, H, W); weight and bias (C,)."""
    return _affine(x, weight, bias, eps) if tracing() else _ChannelNorm.apply(x, weight, bias, eps)


# --- 1x1 convolution of a map that is not kept -----------------------------------------------------------------------


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., Tensor], weight: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(weight, *inputs)
        ctx.make = make
        return _times(weight.flatten(1), make(*inputs))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (weight, *kept) = grads, ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        inputs = [t.detach().requires_grad_(need) for t, need in zip(kept, needed, strict=True)]
        with torch.enable_grad():
            made = ctx.make(*inputs)
        # Under autocast the gradient is narrower than what was made and than the weight.
        dw = (grad.flatten(2) @ made.detach().flatten(2).transpose(1, 2).to(grad.dtype)).sum(0)
        back = _times(weight.flatten(1).t().to(grad.dtype), grad).to(made.dtype)
        wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
        found = iter(torch.autograd.grad(made, wanted, back) if wanted else ())
        return None, dw.view_as(weight).to(weight.dtype), *(next(found) if need else None for need in needed)


def _times(matrix: Tensor, x: Tensor) -> Tensor:
    return torch.matmul(matrix, x.flatten(2)).unflatten(2, x.shape[2:])


def project(make: Callable[..., Tensor], weight: Tensor, *inputs: Tensor) -> Tensor:
    """1x1 convolution of ``make(*inputs)``, which training makes again for the backward pass instead of keeping it.

    Eager it is a matrix product, since a CPU's convolution reorders the map before and after.

    Args:
        make: a cheap function of ``inputs`` to a map (N, C, H, W), without random numbers.
        weight: (D, C, 1, 1).
        inputs: tensors.

    Returns:
        (N, D, H, W).
    """
    if tracing():
        return F.conv2d(make(*inputs), weight)
    if torch.is_grad_enabled():
        return _Project.apply(make, weight, *inputs)
    return _times(weight.flatten(1), make(*inputs))
