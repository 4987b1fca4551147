"""ASSANet as its paper writes it, and how much faster and smaller :mod:`sr.archs.assanet` is.

The reference is slow on purpose and shares no code with the package: tap maps are stored and applied to unfolded
patches, tiles are a loop, attention is normalised maps and two matrix products.
``python tests/archs/assanet_reference.py`` prints the comparison as a Markdown table (five minutes on two cores).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from sr.archs import assanet, stencils
from sr.profiling import alternate, extra_memory


def direct_dynamic_conv(x: Tensor, weight: Tensor) -> Tensor:
    """The direct form of :func:`sr.archs.stencils.dynamic_conv`: nine tap maps per channel, on unfolded patches."""
    n, c, h, w = x.shape
    taps = F.conv2d(x, weight, groups=c).view(n, c, 9, h - 2, w - 2)
    return (taps * F.unfold(x, 3).view(n, c, 9, h - 2, w - 2)).sum(2)


def direct_gated_conv(x: Tensor, weight: Tensor) -> Tensor:
    """What :func:`sr.archs.stencils.gated_conv` computes."""
    a, b = F.conv2d(x, weight, groups=x.shape[1]).chunk(2, 1)
    return F.gelu(a) * b


def direct_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x.movedim(1, -1), weight.shape, weight, bias).movedim(-1, 1)


def tile_starts(size: int, tile: int) -> list[int]:
    """Even steps, rounded up; the last tile ends where the picture does."""
    count = -(-size // tile)
    if count == 1:
        return [0]
    step = -(-(size - tile) // (count - 1))
    return sorted({min(i * step, size - tile) for i in range(count)})


def _attend(q: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    shape = q.shape
    q, v = q.flatten(2), v.flatten(2)
    weights = F.relu(F.normalize(q, dim=-1) @ F.normalize(v, dim=-1).transpose(1, 2) * temperature)
    return (weights @ v).view(shape)


def _attend_in_tiles(q: Tensor, v: Tensor, temperature: Tensor, tile: int) -> Tensor:
    out, cover = torch.zeros_like(q), torch.zeros_like(q)
    for i in tile_starts(q.shape[2], tile):
        for j in tile_starts(q.shape[3], tile):
            here = (..., slice(i, i + tile), slice(j, j + tile))
            out[here] += _attend(q[here], v[here], temperature)
            cover[here] += 1
    return out / cover


def reference(state: Mapping[str, Tensor], lq: Tensor, tile: int | None) -> Tensor:
    """The network of a published ``state_dict``; ``tile=None`` attends over the whole picture."""
    mean = torch.tensor([0.4488, 0.4371, 0.4040]).view(3, 1, 1).to(lq)
    pad = (1, 1, 1, 1)

    def block(x: Tensor, p: str) -> Tensor:
        y = direct_norm(x, state[p + "norm1.body.weight"], state[p + "norm1.body.bias"])
        y = F.conv2d(y, state[p + "attn.project_in.weight"])
        q, v = direct_dynamic_conv(F.pad(y, pad), state[p + "attn.dynamic_conv.weight.weight"]).chunk(2, 1)
        t = state[p + "attn.temperature"]
        y = _attend(q, v, t) if tile is None else _attend_in_tiles(q, v, t, tile)
        x = x + F.conv2d(y, state[p + "attn.project_out.weight"])
        y = direct_norm(x, state[p + "norm2.body.weight"], state[p + "norm2.body.bias"])
        y = direct_gated_conv(
            F.pad(F.conv2d(y, state[p + "ffn.project_in.weight"]), pad), state[p + "ffn.dwconv.weight"]
        )
        return x + F.conv2d(y, state[p + "ffn.project_out.weight"])

    def conv(x: Tensor, p: str) -> Tensor:
        return F.conv2d(x, state[p + "weight"], state[p + "bias"], padding=1)

    x = shallow = F.conv2d(lq - mean, state["overlap_embed.0.proj.weight"], padding=1)
    group = 0
    while f"deep_feature_extraction.{group}.body.0.attn.temperature" in state:
        p, y, depth = f"deep_feature_extraction.{group}.body.", x, 0
        while f"{p}{depth}.attn.temperature" in state:
            y, depth = block(y, f"{p}{depth}."), depth + 1
        x, group = x + conv(y, f"{p}{depth}."), group + 1
    x = conv(conv(x, f"deep_feature_extraction.{group}.") + shallow, "upsample.0.")
    return F.pixel_shuffle(x, round((x.shape[1] / 3) ** 0.5)) + mean


# --- measurements ----------------------------------------------------------------------------------------------------

FORMS = ("direct", "swapped", "eager", "compiled")


def dynamic_conv_jobs(channels: int = 64, size: int = 128, backward: bool = False) -> dict[str, Callable[[], object]]:
    """The dynamic convolution of one (1, channels, size, size) map: direct, eager, compiled."""
    torch.manual_seed(0)
    x = torch.randn(1, channels, size, size, requires_grad=backward)
    weight = torch.randn(9 * channels, 1, 3, 3, requires_grad=backward)

    def job(form: str) -> Callable[[], object]:
        def run() -> None:
            stencils.compile_kernels = form == "compiled"
            convolve = direct_dynamic_conv if form == "direct" else stencils.dynamic_conv
            with torch.set_grad_enabled(backward):
                y = convolve(F.pad(x, (1, 1, 1, 1)), weight)
            if backward:
                y.sum().backward()

        return run

    return {form: job(form) for form in ("direct", "eager", "compiled")}


def network_jobs(size: int = 128, backward: bool = False, model: str = "assanet_s") -> dict[str, Callable[[], object]]:
    """A x4 network on one size x size picture, in each of ``FORMS``.

    ``direct`` is :func:`reference`; ``swapped`` the package's network, eager, with the direct dynamic convolution.
    Forward attends in tiles, as in evaluation, and forward + backward over the whole patch, as in training.
    """
    torch.manual_seed(0)
    network = getattr(assanet, model)(scale=4).train(backward)
    state, lq = dict(network.state_dict(keep_vars=True)), torch.rand(1, 3, size, size)

    def job(form: str) -> Callable[[], object]:
        def run() -> None:
            stencils.compile_kernels = form == "compiled"
            assanet.dynamic_conv = direct_dynamic_conv if form == "swapped" else stencils.dynamic_conv
            with torch.set_grad_enabled(backward):
                out = reference(state, lq, None if backward else network.tile) if form == "direct" else network(lq)
            if backward:
                network.zero_grad(set_to_none=False)
                out.square().mean().backward()

        return run

    return {form: job(form) for form in FORMS}


def network_job(form: str, size: int = 128, backward: bool = False, model: str = "assanet_s") -> Callable[[], object]:
    """One of :func:`network_jobs`, for :func:`sr.profiling.extra_memory`."""
    return network_jobs(size, backward, model)[form]


def _row(name: str, values: Mapping[str, float], unit: str) -> str:
    base = values["direct"]
    cells = (f"{values[f]:.3g} {unit} ({base / values[f]:.1f}x)" if f in values else "" for f in FORMS)
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="assanet_s")
    parser.add_argument("--size", type=int, default=128, help="edge of the picture in pixels")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| | " + " | ".join(FORMS) + " |\n|---|" + "---|" * len(FORMS))
    for backward, name in ((False, "forward"), (True, "forward + backward")):
        seconds = alternate(dynamic_conv_jobs(64, args.size, backward), 3 * args.repeats)
        row = {form: 1000 * value for form, value in seconds.items()}
        print(_row(f"dynamic convolution, 64 channels, {name}", row, "ms"), flush=True)
    for backward, name in ((False, "forward"), (True, "forward + backward")):
        seconds = alternate(network_jobs(args.size, backward, args.model), args.repeats)
        print(_row(f"{args.model} x4, {name}", seconds, "s"), flush=True)
        memory = {form: extra_memory(network_job, form, args.size, backward, args.model) for form in FORMS}
        print(_row(f"extra memory, {name}", memory, "MiB"), flush=True)


if __name__ == "__main__":
    main()
