"""SparseSR: dense convolutions for local detail, sparse window attention for repeated structure.

Original to this project (Apache-2.0). The body is a stack of groups; a group is a few residual blocks of two dense
3x3 convolutions and one adaptive sparse self-attention layer (:class:`SparseAttention`). The choice of windows is made
once and shared along the depth. The result is added to the bicubically enlarged input, and since the last convolution
starts at zero, an untrained network is bicubic (but for two pixels at the border).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sr.errors import SRError
from sr.network import SRNetwork
from sr.registry import register_arch

# Of attention at a time on a GPU, where fused kernels fail above 65,535 (https://github.com/pytorch/pytorch/issues/146704).
_GPU_BATCH = 2**15


def window_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float | None = None) -> Tensor:
    """Multi-head scaled dot-product attention, ``softmax(scale * q k^T) v``.

    Args:
        q: (B, T, C) queries.
        k: (B, S, C) keys.
        v: (B, S, Cv) values.
        heads: number of heads; divides C and Cv.
        scale: factor of the products. Default: 1 / sqrt(C / heads).

    Returns:
        (B, T, Cv)
    """
    if q.shape[-1] % heads or v.shape[-1] % heads:
        raise SRError(f"{heads} attention heads do not divide a width of {q.shape[-1]} and {v.shape[-1]} channels")
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))  # (B, heads, tokens, channels)
    if q.device.type == "cpu":
        # In float32 also under autocast: the bfloat16 kernel's backward pass is nine times slower (38 ms against 4).
        with torch.autocast("cpu", enabled=False):
            out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=scale).to(v.dtype)
    else:
        parts = zip(*(t.split(_GPU_BATCH) for t in (q, k, v)), strict=True)
        outs = [F.scaled_dot_product_attention(a, b, c, scale=scale) for a, b, c in parts]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.transpose(1, 2).flatten(2)


def to_windows(x: Tensor, window: int) -> Tensor:
    """(N, C, H, W) -> (N, H/window, W/window, window², C); H and W are multiples of ``window``."""
    x = x.unflatten(2, (-1, window)).unflatten(4, (-1, window))  # (N, C, Hw, w, Ww, w)
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3, 4)


def from_windows(x: Tensor, window: int) -> Tensor:
    """Inverse of :func:`to_windows`; the result is channels-last in memory."""
    x = x.unflatten(3, (window, window)).permute(0, 5, 1, 3, 2, 4)  # (N, C, Hw, w, Ww, w)
    return x.flatten(4, 5).flatten(2, 3)


Choice = tuple[Tensor, Tensor]  # index and weight, as similar_windows returns them


def similar_windows(descriptor: Tensor, topk: int, radius: int) -> Choice:
    """For each window, itself and the ``topk`` most similar ones among its neighbours, by cosine similarity.

    Candidates are the windows at most ``radius`` windows away in each direction: the cost is linear in the number of
    pixels, and a tile of a picture chooses as the whole picture would. Beyond the border there are none; a slot that
    stays empty falls back to the window itself.

    Args:
        descriptor: (N, Hw, Ww, C) one a window.
        topk: number of windows to choose; at most ``(2 * radius + 1)² - 1``.
        radius: reach, in windows.

    Returns:
        index: (N * Hw * Ww, 1 + topk) int64, into the batch's row-major list of windows; the window itself first.
        weight: (N * Hw * Ww, 1 + topk) similarity, mapped from [-1, 1] to [0, 1]; 1 for the window itself, 0.5 for a
            slot that fell back. Carries gradient.
    """
    n, height, width, _ = descriptor.shape
    reach = 2 * radius + 1
    own = torch.arange(height * width, device=descriptor.device).view(height, width)
    candidates = _neighbours(F.pad(own, (radius,) * 4, value=-1), reach, 0)  # (Hw, Ww, reach² - 1); -1: none there
    # Two windows may be almost as similar: in half precision every fifth window of a photograph would choose others.
    descriptor = F.normalize(descriptor.to(torch.promote_types(descriptor.dtype, torch.float32)), dim=-1)
    around = _neighbours(F.pad(descriptor, (0, 0, *(radius,) * 4)), reach, 1)  # (N, Hw, Ww, C, reach² - 1)
    with torch.autocast(descriptor.device.type, enabled=False):  # which would narrow them again
        score = torch.einsum("nhwc,nhwcm->nhwm", descriptor, around)
    best, slot = score.masked_fill(candidates < 0, -2.0).topk(topk, dim=-1)
    found = best > -1.5
    chosen = torch.where(found, candidates.expand(n, -1, -1, -1).gather(-1, slot), own[..., None])
    index = torch.cat((own.expand(n, -1, -1)[..., None], chosen), -1)
    first = torch.arange(n, device=descriptor.device) * (height * width)
    weight = 0.5 + 0.5 * torch.where(found, best, 0.0)
    weight = torch.cat((torch.ones_like(weight[..., :1]), weight), -1)
    return (index + first[:, None, None, None]).flatten(0, 2), weight.flatten(0, 2)


def _neighbours(x: Tensor, reach: int, dim: int) -> Tensor:
    """(..., H + reach - 1, W + reach - 1, ...) at ``dim`` -> (..., H, W, ..., reach² - 1), all but the centre."""
    around = x.unfold(dim, reach, 1).unfold(dim + 1, reach, 1).flatten(-2)
    centre = reach**2 // 2
    return torch.cat((around[..., :centre], around[..., centre + 1 :]), -1)


def texture(lq: Tensor, window: int) -> Tensor:
    """How much a window has to gain from attention: 0 where it is flat, towards 1 where it is textured.

    ``variance / (variance + s²)`` of the mean of the channels, with s = 4/255: about the strength of visible noise.
    A standard deviation of 4, 8, 16, 32 grey levels of 255 gives 0.5, 0.8, 0.94, 0.98.

    Args:
        lq: (N, C, H, W), [0, 1]; H and W are multiples of ``window``.

    Returns:
        (N, H/window, W/window), [0, 1).
    """
    grey = lq.float().mean(1)
    mean = F.avg_pool2d(grey, window)
    variance = F.avg_pool2d((grey - 0.5).square(), window) - (mean - 0.5).square()
    variance = variance.clamp_min(0)
    return variance / (variance + (4 / 255) ** 2)


class SparseAttention(nn.Module):
    """Attention of each textured window to itself and to its top-k most similar neighbour windows.

    A 3x3 convolution makes matching features, which serve as queries and as keys, and values. Which windows a window
    sees is decided from their mean matching features, *before* any query-key product; whole windows are then gathered
    and go through dense fused attention, without a mask. The similarity of a chosen window multiplies its values, so
    that choosing has a gradient. What was found is weighted by the window's :func:`texture`, and joined with the values
    themselves, which keep the local path alive where there is nothing to find.

    Args:
        dim: channels in and out.
        match_dim: channels of the matching features.
        value_dim: channels of the values.
        heads: attention heads; divides ``match_dim`` and ``value_dim``.
        window: edge of a window, in input pixels.
        topk: how many further windows each window sees.
        radius: how far away, in windows, these may be.
    """

    def __init__(
        self, dim: int, match_dim: int, value_dim: int, heads: int, window: int, topk: int, radius: int
    ) -> None:
        super().__init__()
        if match_dim % heads or value_dim % heads:
            raise SRError(f"{heads} attention heads do not divide match_dim={match_dim} and value_dim={value_dim}")
        if not 0 <= topk < (2 * radius + 1) ** 2:
            raise SRError(f"{topk=} windows cannot be chosen among the {(2 * radius + 1) ** 2 - 1} within {radius=}")
        self.match_dim, self.heads, self.window, self.topk, self.radius = match_dim, heads, window, topk, radius
        self.features = nn.Conv2d(dim, match_dim + value_dim, 3, padding=1)
        self.log_temperature = nn.Parameter(torch.tensor([math.log(10.0)]))  # 1-d: FSDP cannot shard scalars
        self.proj = nn.Conv2d(2 * value_dim, dim, 1)

    def match_and_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Matching features (N, match_dim, H, W), whose products are the attention logits, and values."""
        match, value = self.features(x).split((self.match_dim, self.proj.in_channels // 2), 1)
        value = F.relu(value)
        return F.normalize(match, dim=1) * (0.5 * self.log_temperature).exp(), value

    def forward(
        self, x: Tensor, gate: Tensor, choice: Choice | None, kept: Tensor | None
    ) -> tuple[Tensor, Choice | None]:
        """Apply the layer.

        Args:
            x: (N, dim, H, W); H and W are multiples of ``window``.
            gate: (N * windows,) what multiplies the result of attention, e.g. :func:`texture`.
            choice: what an earlier layer's :func:`similar_windows` found; ``None``: find it here.
            kept: indices of the windows that take part in attention; ``None``: all. The others' gate must be 0.

        Returns:
            The features, of ``x``'s shape, and the choice; ``None`` where no window is kept.
        """
        if kept is not None and len(kept) == 0:
            return x + self._local_path(x), None
        match, value = self.match_and_value(x)
        windows = to_windows(torch.cat((match, value), 1), self.window)  # (N, Hw, Ww, T, match_dim + value_dim)
        shape = windows.shape
        if choice is None:
            choice = similar_windows(windows[..., : self.match_dim].mean(3), self.topk, self.radius)
        index, weight = choice
        windows = windows.flatten(0, 2)
        query = windows[..., : self.match_dim]
        if kept is not None:
            query, index, weight, gate = (t.index_select(0, kept) for t in (query, index, weight, gate))
        # index_select over whole windows: its gradient is a plain sum of rows.
        seen = windows.flatten(1).index_select(0, index.flatten()).view(-1, self.topk + 1, *windows.shape[1:])
        k, v = seen.split((self.match_dim, shape[-1] - self.match_dim), -1)
        v = v * weight[..., None, None].to(v.dtype)
        out = window_attention(query, k.flatten(1, 2), v.flatten(1, 2), self.heads, scale=1.0)
        out = out * gate[:, None, None].to(out.dtype)
        if kept is not None:
            out = out.new_zeros(windows.shape[0], *out.shape[1:]).index_copy(0, kept, out)
        found = from_windows(out.view(*shape[:-1], -1), self.window)
        return x + self.proj(torch.cat((found, value), 1)), choice

    def _local_path(self, x: Tensor) -> Tensor:
        """What remains of the layer where no window takes part in attention: half of its convolutions."""
        features, proj = self.features, self.proj
        assert features.bias is not None
        value = F.conv2d(x, features.weight[self.match_dim :], features.bias[self.match_dim :], padding=1)
        return F.conv2d(F.relu(value), proj.weight[:, proj.in_channels // 2 :], proj.bias)


class ResidualBlock(nn.Module):
    """x + conv(relu(conv(x))): two dense 3x3 convolutions, which is what processors do best.

    ReLU and not GELU: without normalisation features stay small, where GELU is almost linear. After 1,000 steps on the
    sample set the validation pictures were 0.57 dB better with ReLU (32.51 against 31.94 dB, x2, without attention).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(x)))


class BicubicUpsample(nn.Module):
    """Bicubic enlargement (a = -0.5, as MATLAB's ``imresize``) by a whole number, as one depth-wise convolution.

    Equal to :func:`sr.resize.imresize` but for two pixels at the border, where it replicates instead of mirroring.
    """

    kernel: Tensor

    def __init__(self, channels: int, scale: int) -> None:
        super().__init__()
        # Output pixel s*i + p lies at i + (p + 0.5) / s - 0.5 in the input; taps at i-2 ... i+2.
        phase = (torch.arange(scale, dtype=torch.float64) + 0.5) / scale - 0.5
        distance = (phase[:, None] - torch.arange(-2, 3)).abs()
        near = 1.5 * distance**3 - 2.5 * distance**2 + 1
        far = -0.5 * distance**3 + 2.5 * distance**2 - 4 * distance + 2
        taps = torch.where(distance <= 1, near, torch.where(distance < 2, far, 0.0))  # (scale, 5)
        kernel = torch.einsum("ai,bj->abij", taps, taps).reshape(1, scale**2, 1, 5, 5)
        kernel = kernel.expand(channels, -1, -1, -1, -1).flatten(0, 1).float()
        self.register_buffer("kernel", kernel.contiguous(), persistent=False)
        self.channels, self.scale = channels, scale

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (2, 2, 2, 2), mode="replicate")
        with torch.autocast(x.device.type, enabled=False):  # bfloat16 would round the picture itself to 8 bits or fewer
            return F.pixel_shuffle(F.conv2d(x, self.kernel.to(x.dtype), groups=self.channels), self.scale)


@register_arch
class SparseSR(SRNetwork):
    """The project's network: convolutional groups, each with one sparse attention layer.

    Args:
        scale: output edge / input edge.
        dim: channels of the body.
        groups: number of groups.
        blocks: residual blocks in each group.
        match_dim: channels of the features that queries and keys are made of.
        value_dim: channels of the values.
        heads: attention heads; divides ``match_dim`` and ``value_dim``.
        window: edge of an attention window, in input pixels.
        topk: how many further windows each window attends to.
        radius: how many windows away these may be.
        sparsity: windows whose :func:`texture` is at most this, in [0, 1], skip attention. May be changed at any time:
            ``network.sparsity = 0.5``. 0 is the same function as attention everywhere.
        mixer: ``depthwise`` replaces each attention layer by a depth-wise 3x3 convolution, to tell what attention is
            worth.
    """

    def __init__(
        self,
        *,
        scale: int = 4,
        dim: int = 48,
        groups: int = 2,
        blocks: int = 4,
        match_dim: int = 16,
        value_dim: int = 16,
        heads: int = 1,
        window: int = 8,
        topk: int = 2,
        radius: int = 2,
        sparsity: float = 0.0,
        mixer: Literal["attention", "depthwise"] = "attention",
    ) -> None:
        super().__init__(scale=scale)
        for name in ("dim", "groups", "blocks", "match_dim", "value_dim", "heads", "window"):
            if self.hparams[name] < 1:
                raise SRError(f"{name} must be at least 1, not {self.hparams[name]}")
        self.multiple_of = window
        self.window = window
        self.embed = nn.Conv2d(3, dim, 3, padding=1)
        self.groups = nn.ModuleList()
        for _ in range(groups):
            if mixer == "attention":
                layer: nn.Module = SparseAttention(dim, match_dim, value_dim, heads, window, topk, radius)
            else:
                layer = DepthwiseMixer(dim)
            self.groups.append(Group(dim, blocks, layer))
        self.head = nn.Conv2d(dim, 3 * scale**2, 3, padding=1)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        self.base = BicubicUpsample(3, scale)
        # An attention layer reaches to the far edge of the farthest window, a convolution one pixel on.
        self.receptive_field = 2 + groups * (2 * blocks + 1 + (radius + 1) * window)

    @classmethod
    def upgrade(cls, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {k: v.reshape(1) if k.endswith("log_temperature") else v for k, v in state_dict.items()}

    @property
    def sparsity(self) -> float:
        """Texture up to which windows skip attention; saved with the network."""
        return self.hparams["sparsity"]

    @sparsity.setter
    def sparsity(self, value: float) -> None:
        self.hparams["sparsity"] = float(value)

    def upscale(self, lq: Tensor) -> Tensor:
        gate = texture(lq, self.window).flatten()
        kept = None
        if self.sparsity > 0:
            skipped = gate <= self.sparsity
            gate = gate.masked_fill(skipped, 0)
            # A graph whose shapes depend on the picture cannot be compiled: there, every window goes through attention.
            if not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
                kept = (~skipped).nonzero()[:, 0]
        features = shallow = self.embed(lq)
        choice = None
        for group in self.groups:
            features, choice = group(features, gate, choice, kept)
        residual = F.pixel_shuffle(self.head(features + shallow), self.scale)
        return self.base(lq) + residual.to(lq.dtype)


class Group(nn.Module):
    """A few residual blocks, then one layer that mixes more widely."""

    def __init__(self, dim: int, blocks: int, mixer: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ResidualBlock(dim) for _ in range(blocks)))
        self.mixer = mixer

    def forward(
        self, x: Tensor, gate: Tensor, choice: Choice | None, kept: Tensor | None
    ) -> tuple[Tensor, Choice | None]:
        features, choice = self.mixer(self.blocks(x), gate, choice, kept)
        return features, choice


class DepthwiseMixer(nn.Module):
    """What stands in for attention in the ablation: a depth-wise 3x3 convolution beside the identity."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor, gate: Tensor, choice: None, kept: Tensor | None) -> tuple[Tensor, None]:
        return x + self.conv(x), None


def set_sparsity(network: SRNetwork, value: float) -> None:
    """Set ``network.sparsity``, for scripts.

    Raises:
        SRError: not a SparseSR, or a value outside [0, 1].
    """
    if not isinstance(network, SparseSR):
        raise SRError(f"{type(network).__name__} has no sparsity to set; leave --sparsity out")
    if not 0 <= value <= 1:
        raise SRError(f"sparsity lies in [0, 1], not {value}")
    network.sparsity = value


@register_arch
def sparsesr_t(*, scale: int = 4, **kwargs: Any) -> SparseSR:
    """0.18 M parameters at x4: the quickstart's network."""
    return SparseSR(scale=scale, dim=32, groups=2, blocks=4, **kwargs)


@register_arch
def sparsesr_s(*, scale: int = 4, **kwargs: Any) -> SparseSR:
    """0.39 M parameters at x4."""
    return SparseSR(scale=scale, dim=48, groups=2, blocks=4, **kwargs)


@register_arch
def sparsesr_b(*, scale: int = 4, **kwargs: Any) -> SparseSR:
    """0.81 M parameters at x4."""
    return SparseSR(scale=scale, dim=64, groups=2, blocks=5, **kwargs)
