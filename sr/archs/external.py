"""Networks of other people, through spandrel (MIT): its 40-odd architectures, untrained or from a published file.

Spandrel tells from names and shapes which network a file holds. It is only ever given tensors; files are opened by
:mod:`sr.checkpoint`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sr.errors import SRError
from sr.network import SRNetwork
from sr.registry import register_arch

# Smallest input where it is not one pixel: SAFMN pools to an eighth, three times over.
_MIN_SIZE = {"SAFMN": 16}
# What the families call the scale.
_SCALE_NAMES = ("scale", "upscale", "up_scale", "upscale_factor", "upscaling_factor", "upsampling", "sr_rate")
# Classes made for one scale.
_FIXED_SCALES = {"UpCunet2x": 2, "UpCunet2x_fast": 2, "UpCunet3x": 3, "UpCunet4x": 4}
_REFUSED = {
    "AuraSR": "it paints from random noise, no two runs agree",
    "IPT": "it holds networks for several tasks, of which none is marked",
}
_LARGEST_EMPTY = 1024  # edge of a tensor without elements, which may claim any; some transformers have such


@register_arch
class SpandrelNetwork(SRNetwork):
    """A network of spandrel's on the project's contract.

    Pictures that the network does not accept are continued by their mirror image, as spandrel does it.

    Args:
        scale: output edge / input edge.
        arch: spandrel's name of the architecture, e.g. ``SAFMN``; ``architecture.class`` where the names differ.
        args: further constructor arguments of that architecture.
        min_size: smallest height and width that it accepts; what is known of the architecture by default.
        multiple_of: height and width have to be multiples of this.
    """

    def __init__(
        self,
        *,
        scale: int = 4,
        arch: str = "SAFMN",
        args: dict[str, Any] | None = None,
        min_size: int | None = None,
        multiple_of: int = 1,
    ) -> None:
        super().__init__(scale=scale)
        cls = _find(arch)
        names, args = inspect.signature(cls).parameters, dict(args or {})
        scale_name = next((name for name in _SCALE_NAMES if name in names), None)
        if scale_name is not None:
            args.setdefault(scale_name, scale)
        elif _FIXED_SCALES.get(cls.__name__) != scale:
            raise SRError(f"{arch} takes none of {', '.join(_SCALE_NAMES)}; it cannot be told the scale")
        try:
            self.network = cls(**args)
        except TypeError as e:
            raise SRError(f"{arch}: {e}; it takes {', '.join(names)}") from e
        self.min_size = _MIN_SIZE.get(arch, 1) if min_size is None else min_size
        self.multiple_of = multiple_of

    def upscale(self, lq: Tensor) -> Tensor:
        sr = self.network(lq.clone())  # RCAN scales the picture that it is given in place
        return sr[0] if isinstance(sr, tuple) else sr  # MM-RealSR also tells how degraded the picture is

    def forward(self, lq: Tensor) -> Tensor:
        if lq.dim() != 4 or self.min_size == self.multiple_of == 1:
            return super().forward(lq)
        below, right = (self._padding(size) for size in lq.shape[-2:])
        rows, columns = (_mirrored(size, more, lq) for size, more in zip(lq.shape[-2:], (below, right), strict=True))
        sr = super().forward(lq[..., rows, :][..., columns])
        return F.pad(sr, (0, -right * self.scale, 0, -below * self.scale))

    def fuse(self) -> SRNetwork:
        """Replace SPAN's convolutions with training branches by the one convolution that they add up to."""
        for parent in list(self.modules()):
            for name, part in list(parent.named_children()):
                if hasattr(part, "update_params") and hasattr(part, "eval_conv"):
                    one = cast(Any, part)
                    one.update_params()
                    fused = nn.Sequential(one.eval_conv, nn.LeakyReLU(0.05)) if one.has_relu else one.eval_conv
                    setattr(parent, name, fused)
        return self


def _mirrored(size: int, more: int, like: Tensor) -> Tensor:
    """Places along an edge of ``size`` pixels and ``more`` behind it: back to the first pixel, which is repeated."""
    at = torch.arange(size + more, device=like.device)
    return at.minimum(2 * (size - 1) - at).clamp(min=0)


def _find(arch: str) -> type[nn.Module]:
    module, _, name = arch.partition(".")
    try:
        cls = getattr(importlib.import_module(f"spandrel.architectures.{module}"), name or module, None)
    except ImportError:
        cls = None
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise SRError(f"spandrel has no architecture {arch!r}")
    return cls


def recognise(state_dict: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Arguments of :class:`SpandrelNetwork` and its tensors, for weights of a network that spandrel knows.

    Args:
        state_dict: names and tensors as they were published, without wrappers and common prefixes.

    Returns:
        ``None`` if spandrel does not know them, either.

    Raises:
        SRError: they are incomplete, or those of a network that does not enlarge RGB pictures.
    """
    if not _is_plausible(state_dict):
        return None
    from spandrel import MAIN_REGISTRY, canonicalize_state_dict  # takes a second, torchvision included

    guess = "(unknown)"
    try:
        state = canonicalize_state_dict(dict(state_dict))
        known = (entry for entry in MAIN_REGISTRY.architectures("detection") if entry.detect(state))
        if (entry := next(known, None)) is None:
            return None
        guess = entry.architecture.id
        found = entry.architecture.load(state)
    except Exception as e:  # it reads shapes and names without checking them, so anything may happen
        reason = " ".join(str(e).split())[:300] or type(e).__name__
        raise SRError(
            f"spandrel takes it for a network of the architecture {guess}, but cannot load it ({reason})"
        ) from e
    arch, model = found.architecture.id, found.model
    channels = (found.input_channels, found.output_channels)
    sizes = found.size_requirements
    if found.purpose != "SR" or found.scale < 2:
        raise SRError(f"{arch} at scale {found.scale} is no network that enlarges pictures (but for {found.purpose})")
    if channels != (3, 3):
        raise SRError(f"this {arch} takes and gives {channels[0]} and {channels[1]} channels, not RGB")
    if arch in _REFUSED:
        raise SRError(f"{arch} is not supported: {_REFUSED[arch]}")
    if sizes.square:
        raise SRError(f"{arch} is not supported: it takes square pictures only")
    name = type(model).__name__
    is_plain = getattr(importlib.import_module(f"spandrel.architectures.{arch}"), arch, None) is type(model)
    hparams = {
        "scale": found.scale,
        "arch": arch if is_plain else f"{arch}.{name}",
        "args": _chosen(type(model), cast(Any, model).hyperparameters),
        "min_size": max(sizes.minimum, 1),
        "multiple_of": sizes.multiple_of,
    }
    return hparams, {f"network.{key}": value for key, value in model.state_dict().items()}


def _chosen(cls: type[nn.Module], hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """What rebuilds a network, as JSON gives it back: the scale, and what is not the default (classes, functions)."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}
    chosen = {k: v for k, v in hyperparameters.items() if k in _SCALE_NAMES or v != defaults.get(k)}
    return cast(dict[str, Any], json.loads(json.dumps(chosen)))


def _is_plausible(state_dict: Mapping[str, Tensor]) -> bool:
    """Whether names and shapes speak of no more than the file holds; they decide how large a network is built."""
    highest = 8 * len(state_dict) + 64  # of parts with a number, some of which have no weights
    numbers = (number for key in state_dict for number in re.findall(r"[0-9]+", key))
    return all(len(number) < 7 and int(number) <= highest for number in numbers) and all(
        value.layout == torch.strided
        and value.device.type == "cpu"
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
        and (value.numel() > 0 or max(value.shape) <= _LARGEST_EMPTY)
        for value in state_dict.values()
    )
