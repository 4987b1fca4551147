"""Measure what networks cost and give: ``python scripts/benchmark.py model -m sparsesr_s``, or ``leaderboard`` ..."""

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks import data, leaderboard, tiles, train, upscale
from torch import Tensor

import sr
from sr.archs.sparsesr import SparseAttention, from_windows, to_windows
from sr.efficiency import DTYPES, HD, Run, cards, to_markdown
from sr.errors import SRError, run_script
from sr.profiling import Job, alternate, extra_memory

# Other people's networks as their papers have them.
PEERS: dict[str, dict[str, Any]] = {
    "SAFMN": {"dim": 36, "n_blocks": 8},
    "SPAN": {"num_in_ch": 3, "num_out_ch": 3, "feature_channels": 48},
}


class DenseAttention(SparseAttention):
    """The same function, computed densely over all candidate windows, then masked; the scores are written out."""

    fused = False

    def _windows(self, x: Tensor) -> Tensor:
        """(N, C, Hw, Ww, ...) -> each window's (2 radius + 1)² neighbours, itself included, zero beyond the border."""
        reach = 2 * self.radius + 1
        x = F.pad(x, (0, 0, *(self.radius,) * 4)) if x.dim() == 4 else F.pad(x, (0, 0, 0, 0, *(self.radius,) * 4))
        return x.unfold(1, reach, 1).unfold(2, reach, 1).flatten(-2).movedim(-1, 3)

    def forward(self, x, gate, choice, kept):  # type: ignore[no-untyped-def]
        match, value = self.match_and_value(x)
        m, v = to_windows(match, self.window), to_windows(value, self.window)  # (N, Hw, Ww, T, C)
        n, height, width, tokens, _ = m.shape
        own = torch.arange(1, height * width + 1, device=x.device).view(1, height, width, 1)
        candidates = self._windows(own.float())[..., 0]  # (1, Hw, Ww, 25), counted from 1; 0: none there
        descriptor = F.normalize(m.mean(3), dim=-1)
        score = torch.einsum("nhwc,nhwkc->nhwk", descriptor, self._windows(descriptor))
        is_own = candidates == own
        best = score.masked_fill((candidates == 0) | is_own, -2.0).topk(self.topk, dim=-1).indices
        chosen = is_own.expand(n, -1, -1, -1).scatter(-1, best, True)
        weight = torch.where(is_own, 1.0, 0.5 + 0.5 * score) * chosen
        k, values = self._windows(m).flatten(3, 4), (self._windows(v) * weight[..., None, None]).flatten(3, 4)
        mask = chosen.repeat_interleave(tokens, -1)[..., None, :]  # (N, Hw, Ww, 1, 25 T)
        if not self.fused:
            out = (m @ k.transpose(-1, -2)).masked_fill(~mask, float("-inf")).softmax(-1) @ values
        else:
            q, k, values, mask = (t.flatten(0, 2)[:, None] for t in (m, k, values, mask))
            out = F.scaled_dot_product_attention(q, k, values, attn_mask=mask, scale=1.0)[:, 0]
            out = out.view(n, height, width, tokens, -1)
        out = out * gate.view(n, height, width, 1, 1)
        return x + self.proj(torch.cat((from_windows(out, self.window), value), 1)), choice


class DenseMasked(DenseAttention):
    """The same with fused attention, which takes the mask."""

    fused = True


def layer(form: str, size: int) -> Callable[[], Tensor]:
    """One attention layer of sparsesr_s on size x size features: sparse, none kept, masked (fused) or dense."""
    torch.manual_seed(0)
    network = sr.create_model("sparsesr_s").eval()
    module = copy.deepcopy(network.groups[0].mixer).to(memory_format=torch.channels_last)  # type: ignore[union-attr,index]
    if form in ("masked", "dense"):
        module.__class__ = DenseMasked if form == "masked" else DenseAttention
    x = torch.randn(1, 48, size, size).contiguous(memory_format=torch.channels_last)
    gate = torch.ones((size // module.window) ** 2)
    kept = torch.zeros(0, dtype=torch.long) if form == "none kept" else None
    return torch.inference_mode()(lambda: module(x, gate, None, kept)[0])


def picture_job(name: str, size: int, texture: float, sparsity: float) -> Callable[[], Tensor]:
    """A whole x4 network on a size x size picture that is flat (texture 0) or noise."""
    torch.manual_seed(0)
    network = sr.create_model(name, scale=4).eval().to(memory_format=torch.channels_last)
    network.sparsity = sparsity  # type: ignore[assignment]
    lq = (0.5 + texture * (torch.rand(1, 3, size, size) - 0.5)).contiguous(memory_format=torch.channels_last)
    return torch.inference_mode()(lambda: network(lq))


def attention(args: argparse.Namespace) -> None:
    """What sparsity saves: against dense attention, with the picture's size, and on flat pictures."""
    forms = ("sparse", "masked", "dense")
    jobs: dict[str, Job] = {form: layer(form, 256) for form in forms}
    expected = layer("sparse", 256)()
    for form in forms[1:]:
        print(f"largest difference of {form} from sparse: {(layer(form, 256)() - expected).abs().max():.1e}")
    seconds = alternate(jobs, args.repeats)
    memory = {form: extra_memory(layer, form, 256) for form in forms}
    print("\n| attention layer, 256x256 features | time | | extra memory | |\n|---|---|---|---|---|")
    for form in forms:
        slower, larger = seconds[form] / seconds["sparse"], memory[form] / memory["sparse"]
        print(f"| {form} | {1000 * seconds[form]:.1f} ms | {slower:.1f}x | {memory[form]:.0f} MiB | {larger:.1f}x |")

    print("\n| network, x4 | 256x256 | 512x512 | growth |\n|---|---|---|---|")
    for name in args.models:
        seconds = alternate({str(s): picture_job(name, s, 1.0, 0.0) for s in (256, 512)}, args.repeats)
        memory = {str(s): extra_memory(picture_job, name, s, 1.0, 0.0) for s in (256, 512)}
        for what, values, unit, factor in (("time", seconds, "ms", 1000), ("extra memory", memory, "MiB", 1)):
            small, large = factor * values["256"], factor * values["512"]
            print(f"| {name}, {what} | {small:.0f} {unit} | {large:.0f} {unit} | {large / small:.2f}x |")

    print("\n| sparsity 0.05, 512x512 | textured | flat | ratio |\n|---|---|---|---|")
    jobs = {"textured": layer("sparse", 512), "flat": layer("none kept", 512)}
    seconds = alternate(jobs, args.repeats)
    row = " | ".join(f"{1000 * value:.1f} ms" for value in seconds.values())
    print(f"| attention layer | {row} | {seconds['textured'] / seconds['flat']:.2f}x |")
    for name in args.models:
        jobs = {kind: picture_job(name, 512, t, 0.05) for kind, t in (("textured", 1.0), ("flat", 0.0))}
        seconds = alternate(jobs, args.repeats)
        row = " | ".join(f"{1000 * value:.0f} ms" for value in seconds.values())
        print(f"| {name} | {row} | {seconds['textured'] / seconds['flat']:.2f}x |")


def model(args: argparse.Namespace) -> None:
    """The efficiency cards of networks: parameters, MACs, FLOPs, activations, latency, memory."""
    networks = {name: find_network(name, args.scale) for name in args.model}
    run = Run(device=args.device, dtype=args.dtype, compile=args.compile, repeats=args.repeats)
    result = cards(networks, size=args.size, run=run)
    print(to_markdown(result))
    print("\nNot counted: element-wise operations, norms, pooling, resizing, Fourier transforms. 1 MAC = 2 FLOPs.")
    if args.json is not None:
        try:
            args.json.write_text(json.dumps(result, indent=2) + "\n")
        except OSError as e:
            raise SRError(f"cannot write {args.json} ({e})") from e


def find_network(name: str, scale: int) -> sr.SRNetwork:
    """A registered model, ``spandrel:ARCH`` or ``spandrel:ARCH:{"argument": ...}``, installed weights or a file."""
    if name in sr.list_models():
        return sr.create_model(name, scale=scale)
    if not name.startswith("spandrel:"):
        try:
            return sr.load(name)
        except SRError as e:
            raise SRError(f"{e}\nmodels with random weights: {', '.join(sr.list_models())}, spandrel:ARCH") from e
    _, arch, arguments = (*name.split(":", 2), "")[:3]
    try:
        given = json.loads(arguments) if arguments else PEERS.get(arch, {})
    except ValueError as e:
        raise SRError(f"{arguments!r} is not JSON; write for example 'spandrel:SAFMN:{{\"dim\": 36}}'") from e
    return sr.archs.SpandrelNetwork(arch=arch, scale=scale, args=given)


def picture_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    return int(width), int(height)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("attention", help=attention.__doc__, description=attention.__doc__)
    command.add_argument("--models", nargs="+", default=["sparsesr_t", "sparsesr_s"])
    command.set_defaults(run=attention)
    command = commands.add_parser("model", help=model.__doc__, description=model.__doc__)
    command.add_argument("-m", "--model", action="append", required=True, help=find_network.__doc__)
    command.add_argument("--scale", type=int, default=4, help="of networks with random weights (default: 4)")
    command.add_argument("--size", type=picture_size, default=HD, metavar="WxH", help="of the output (1280x720)")
    command.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    command.add_argument("--dtype", default="float32", choices=DTYPES, help="the narrow ones by autocast")
    command.add_argument("--compile", action="store_true", help="time the networks under torch.compile")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the cards there as well")
    command.set_defaults(run=model)
    data.add_to(commands)
    leaderboard.add_to(commands)
    tiles.add_to(commands, find_network, picture_size)
    train.add_to(commands)
    upscale.add_to(commands)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.run(args)


if __name__ == "__main__":
    run_script(main)
