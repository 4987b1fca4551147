"""How much time our modules cost above the bare operations of the published networks.

Each network is written a second time as plain calls of ``torch.nn.functional`` with the same weights, and both have to
give the same picture. They take turns on one thread, in processor time, which other programs disturb less; every round
gives the ratio of the fastest runs. ``python tests/archs/zoo_overhead.py`` prints a Markdown table, and fails if the
median over the rounds is above 1.03 anywhere.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

import sr
from sr.errors import SRError, run_script

LIMIT = 1.03


class Plain:
    """The networks' operations on a ``state_dict``."""

    def __init__(self, state: Mapping[str, Tensor], scale: int) -> None:
        self.state, self.scale = state, scale

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """(1, 3, H, W) -> (1, 3, scale*H, scale*W)."""
        network: Callable[[Tensor], Tensor] = getattr(self, name.removesuffix("_s"))
        return network(x)

    def conv(self, x: Tensor, key: str, padding: int = 0, stride: int = 1, groups: int = 1) -> Tensor:
        weight, bias = self.state[f"{key}.weight"], self.state.get(f"{key}.bias")
        return F.conv2d(x, weight, bias, stride, padding, groups=groups)

    def conv3(self, x: Tensor, key: str) -> Tensor:
        return self.conv(x, key, padding=1)

    def depthwise(self, x: Tensor, key: str) -> Tensor:
        return self.conv(x, key, padding=1, groups=x.shape[1])

    def blueprint(self, x: Tensor, key: str, padding: int = 1, stride: int = 1) -> Tensor:
        x = self.conv(x, f"{key}.pw")
        return self.conv(x, f"{key}.dw", padding, stride, groups=x.shape[1])

    def blocks(self, pattern: str) -> list[str]:
        """Prefixes ``pattern.format(0)``, ``pattern.format(1)`` ... (or from 1 on) that weights have."""
        names = (pattern.format(i) for i in range(100))
        return [name for name in names if any(key.startswith(name) for key in self.state)]

    def contrast(self, x: Tensor, key: str) -> Tensor:
        gate = x.std((2, 3), correction=0, keepdim=True) + x.mean((2, 3), keepdim=True)
        gate = self.conv(F.relu(self.conv(gate, f"{key}.conv_du.0")), f"{key}.conv_du.2")
        return x * torch.sigmoid(gate)

    def smfanet(self, x: Tensor) -> Tensor:
        x = shallow = self.conv3(x, "to_feat")
        for p in self.blocks("feats.{}."):
            y, z = self.conv(F.normalize(x), f"{p}smfa.linear_0").chunk(2, 1)
            h, w = z.shape[-2:]
            cells = self.depthwise(F.adaptive_max_pool2d(z, (max(h // 8, 1), max(w // 8, 1))), f"{p}smfa.dw_conv")
            spread = torch.var(z, (2, 3), keepdim=True) * self.state[f"{p}smfa.belt"]
            gate = F.gelu(self.conv(cells * self.state[f"{p}smfa.alpha"] + spread, f"{p}smfa.linear_1"))
            y = self.conv(self.conv(y, f"{p}smfa.lde.conv_0.0", 1, groups=y.shape[1]), f"{p}smfa.lde.conv_0.1")
            y = self.conv(F.gelu(y), f"{p}smfa.lde.conv_1")
            x = x + self.conv(z * F.interpolate(gate, size=(h, w), mode="nearest") + y, f"{p}smfa.linear_2")
            y = F.gelu(self.conv(F.normalize(x), f"{p}pcfn.conv_0"))
            near, rest = y.split([y.shape[1] // 4, y.shape[1] - y.shape[1] // 4], 1)
            x = x + self.conv(torch.cat((F.gelu(self.conv3(near, f"{p}pcfn.conv_1")), rest), 1), f"{p}pcfn.conv_2")
        return F.pixel_shuffle(self.conv3(x + shallow, "to_img.0"), self.scale)

    def rlfn(self, x: Tensor) -> Tensor:
        x = shallow = self.conv3(x * 255, "conv_1")
        for p in self.blocks("block_{}."):
            y = x
            for key in ("c1_r", "c2_r", "c3_r"):
                y = F.leaky_relu(self.conv3(y, p + key), 0.05)
            x = self.conv(y + x, f"{p}c5")
            narrow = self.conv(x, f"{p}esa.conv1")
            coarse = F.max_pool2d(self.conv(narrow, f"{p}esa.conv2", stride=2), 7, 3)
            wide = F.interpolate(self.conv3(coarse, f"{p}esa.conv3"), size=x.shape[-2:], mode="bilinear")
            x = x * torch.sigmoid(self.conv(wide + self.conv(narrow, f"{p}esa.conv_f"), f"{p}esa.conv4"))
        return F.pixel_shuffle(self.conv3(self.conv3(x, "conv_2") + shallow, "upsampler.0"), self.scale) / 255

    def imdn(self, x: Tensor) -> Tensor:
        x = shallow = self.conv3(x, "fea_conv")
        outputs = []
        for p in self.blocks("IMDB{}."):
            kept, y, width = [], x, x.shape[1]
            for key in ("c1", "c2", "c3"):
                first, y = F.leaky_relu(self.conv3(y, p + key), 0.05).split([width // 4, width - width // 4], 1)
                kept.append(first)
            y = self.contrast(torch.cat((*kept, self.conv3(y, f"{p}c4")), 1), f"{p}cca")
            x = x + self.conv(y, f"{p}c5")
            outputs.append(x)
        x = F.leaky_relu(self.conv(torch.cat(outputs, 1), "c.0"), 0.05)
        return F.pixel_shuffle(self.conv3(self.conv3(x, "LR_conv") + shallow, "upsampler.0"), self.scale)

    def pan(self, picture: Tensor) -> Tensor:
        x = shallow = self.conv3(picture, "conv_first")
        for p in self.blocks("SCPA_trunk.{}."):
            a = self.conv3(F.leaky_relu(self.conv(x, f"{p}conv1_a"), 0.2), f"{p}k1.0")
            b = F.leaky_relu(self.conv(x, f"{p}conv1_b"), 0.2)
            b = self.conv3(b, f"{p}PAConv.k3") * torch.sigmoid(self.conv(b, f"{p}PAConv.k2"))
            joined = torch.cat((a, self.conv3(b, f"{p}PAConv.k4")), 1)
            x = self.conv(F.leaky_relu(joined, 0.2), f"{p}conv3") + x
        x = self.conv3(x, "trunk_conv") + shallow
        for i in (1, 2):
            x = self.conv3(F.interpolate(x, scale_factor=2, mode="nearest"), f"upconv{i}")
            x = F.leaky_relu(x * torch.sigmoid(self.conv(x, f"att{i}.conv")), 0.2)
            x = F.leaky_relu(self.conv3(x, f"HRconv{i}"), 0.2)
        return self.conv3(x, "conv_last") + F.interpolate(picture, scale_factor=4, mode="bilinear")

    def bsrn(self, x: Tensor) -> Tensor:
        x = shallow = self.blueprint(x.repeat(1, 4, 1, 1), "fea_conv")
        outputs = []
        for p in self.blocks("B{}."):
            kept, y = [], x
            for i in (1, 2, 3):
                kept.append(F.gelu(self.conv(y, f"{p}c{i}_d")))
                y = F.gelu(self.blueprint(y, f"{p}c{i}_r") + y)
            y = self.conv(torch.cat((*kept, F.gelu(self.blueprint(y, f"{p}c4"))), 1), f"{p}c5")
            narrow = self.conv(y, f"{p}esa.conv1")
            coarse = F.max_pool2d(self.blueprint(narrow, f"{p}esa.conv2", 0, 2), 7, 3)
            coarse = F.gelu(self.blueprint(coarse, f"{p}esa.conv_max"))
            coarse = self.blueprint(F.gelu(self.blueprint(coarse, f"{p}esa.conv3")), f"{p}esa.conv3_")
            wide = F.interpolate(coarse, size=x.shape[-2:], mode="bilinear")
            y = y * torch.sigmoid(self.conv(wide + self.conv(narrow, f"{p}esa.conv_f"), f"{p}esa.conv4"))
            x = self.contrast(y, f"{p}cca") + x
            outputs.append(x)
        x = self.blueprint(F.gelu(self.conv(torch.cat(outputs, 1), "c1")), "c2") + shallow
        return F.pixel_shuffle(self.conv3(x, "upsampler.upsampleOneStep.0"), self.scale)


NAMES = ("smfanet", "rlfn", "rlfn_s", "imdn", "pan", "bsrn")


def pair(name: str, size: int, scale: int = 4) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Our network and the plain one on the same picture."""
    torch.manual_seed(0)
    network = sr.create_model(name, scale=scale).eval().requires_grad_(False)
    for parameter in network.parameters():  # some begin as 0 or 1, which would hide what they do
        parameter.add_(torch.randn_like(parameter), alpha=0.02)
    plain, x = Plain(network.state_dict(), scale), torch.rand(1, 3, size, size)
    return lambda: network(x), lambda: plain(name, x)


@torch.inference_mode()
def ratios(ours: Callable[[], Tensor], plain: Callable[[], Tensor], rounds: int, repeats: int) -> list[float]:
    """Fastest run of ours / fastest run of the plain one, for each round."""

    def seconds(run: Callable[[], Tensor]) -> float:
        start = time.process_time()
        run()
        return time.process_time() - start

    torch.testing.assert_close(ours(), plain(), atol=1e-5, rtol=1e-5)
    found = []
    for _ in range(rounds):
        times = [(seconds(ours), seconds(plain)) for _ in range(repeats)]
        found.append(min(a for a, _ in times) / min(b for _, b in times))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, help="networks (default: all)")
    parser.add_argument("--size", type=int, default=128, help="edge of the input in pixels")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each in a round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    slow = []
    print(
        f"| network, x4, {args.size}x{args.size} | time / time of the plain operations, median | range |\n|---|---|---|"
    )
    for name in args.names:
        found = ratios(*pair(name, args.size), args.rounds, args.repeats)
        median = statistics.median(found)
        print(f"| {name} | {median:.3f} | {min(found):.3f} to {max(found):.3f} |", flush=True)
        if median > LIMIT:
            slow.append(name)
    if slow:
        raise SRError(f"more than {LIMIT} times the plain operations' time: {', '.join(slow)}")


if __name__ == "__main__":
    run_script(main)
