"""Networks of other people, through spandrel (MIT), to be trained and measured like the project's own.

Needs ``pip install spandrel``, which the extra ``dev`` brings along.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from torch import Tensor, nn

from sr.errors import SRError
from sr.network import SRNetwork
from sr.registry import register_arch

# Smallest input where it is not one pixel: SAFMN pools to an eighth, three times over.
_MIN_SIZE = {"SAFMN": 16}
# What the families call the scale.
_SCALE_NAMES = ("scale", "upscale", "upscaling_factor", "upsampling", "sr_rate")


@register_arch
class SpandrelNetwork(SRNetwork):
    """A network of spandrel's, untrained, on the project's contract.

    Args:
        scale: output edge / input edge.
        arch: spandrel's name of the architecture, e.g. ``SAFMN``.
        args: further constructor arguments of that architecture.
    """

    def __init__(self, *, scale: int = 4, arch: str = "SAFMN", args: dict[str, Any] | None = None) -> None:
        super().__init__(scale=scale)
        cls = _find(arch)
        names = inspect.signature(cls).parameters
        scale_name = next((name for name in _SCALE_NAMES if name in names), None)
        if scale_name is None:
            raise SRError(f"{arch} takes none of {', '.join(_SCALE_NAMES)}; it cannot be told the scale")
        try:
            self.network = cls(**{scale_name: scale, **(args or {})})
        except TypeError as e:
            raise SRError(f"{arch}: {e}; it takes {', '.join(names)}") from e
        self.min_size = _MIN_SIZE.get(arch, 1)

    def upscale(self, lq: Tensor) -> Tensor:
        return self.network(lq)


def _find(arch: str) -> type[nn.Module]:
    try:
        module = importlib.import_module(f"spandrel.architectures.{arch}")
    except ModuleNotFoundError as e:
        if e.name == "spandrel":
            raise SRError("networks of other people need spandrel: pip install spandrel") from e
        raise SRError(f"spandrel has no architecture {arch!r}") from e
    return getattr(module, arch)
