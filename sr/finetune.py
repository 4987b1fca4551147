"""Starting a training from weights: which of them fit, and what becomes of the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sr.checkpoint import load
from sr.errors import SRError
from sr.network import SRNetwork

# Less of the network than this may be left untrained without the user saying so.
_ENOUGH = 0.9


@dataclass
class Start:
    """What was done with each tensor.

    Attributes:
        loaded: taken as they are.
        adapted: of the up-sampling head, rearranged for another scale.
        initialised: of the network, not in the file or of another shape; they stay as they were.
        skipped: of the file, without a place in the network.
        settings: hyper-parameters of the same architecture that differ, which no shape need tell.
        share: of the network's weights that were loaded or adapted, in [0, 1].
    """

    loaded: list[str] = field(default_factory=list)
    adapted: list[str] = field(default_factory=list)
    initialised: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    share: float = 0.0

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} tensors loaded, {100 * self.share:.1f} % of the network's weights"]
        for kind in ("adapted", "initialised", "skipped", "settings"):
            lines += [f"  {kind:<12}{name}" for name in getattr(self, kind)]
        return "\n".join(lines)


def start_from(network: SRNetwork, source: str | Path, partly: bool = False) -> Start:
    """Copy weights into a network that is about to be trained.

    Tensors of the same name and shape are copied. Those that make the pixels of a larger picture (as many times more
    channels as the larger scale has more pixels) are rearranged: each new sub-pixel starts as the old one nearest to
    it. So x2 weights start x3 and x4.

    Args:
        network: changed in place.
        source: what :func:`sr.load` reads.
        partly: whether a network of which less than 90 % fits is fine, too.

    Raises:
        SRError: the file cannot be read, or too little of it fits.
    """
    theirs = load(source)
    there, here = theirs.state_dict(), network.state_dict()
    start, new, count = Start(), {}, 0
    for name, own in here.items():
        other = there.get(name)
        if other is not None and other.shape == own.shape:
            start.loaded.append(name)
        elif other is not None and (changed := _rescaled(other, own, theirs.scale, network.scale)) is not None:
            start.adapted.append(f"{name} {list(other.shape)} -> {list(own.shape)}")
            other = changed
        else:
            reason = "not in the file" if other is None else f"{list(other.shape)} there, {list(own.shape)} here"
            start.initialised.append(f"{name} ({reason})")
            continue
        new[name] = other
        count += own.numel()
    start.skipped = [f"{name} {list(value.shape)}" for name, value in there.items() if name not in here]
    start.share = count / sum(value.numel() for value in here.values())
    if start.share < _ENOUGH and not partly:
        raise SRError(
            f"only {100 * start.share:.0f} % of {network.arch} would start from {source} (a {theirs.arch}), "
            f"not e.g. {start.initialised[0]};\n"
            "take fitting weights, or accept it with --model.weights_partly true"
        )
    if theirs.arch == network.arch:
        pairs = ((name, theirs.hparams.get(name), value) for name, value in network.hparams.items() if name != "scale")
        start.settings = [f"{name} {other} there, {value} here" for name, other, value in pairs if other != value]
    network.load_state_dict(here | new)
    return start


def _rescaled(other: Tensor, own: Tensor, theirs: int, ours: int) -> Tensor | None:
    """``(C theirs², ...)`` -> ``(C ours², ...)``, or ``None`` if the shapes say that it is no such tensor."""
    if other.dim() == 0 or other.shape[1:] != own.shape[1:] or theirs == ours:
        return None
    channels, rest = divmod(other.shape[0], theirs**2)
    if rest or own.shape[0] != channels * ours**2:
        return None
    # Sub-pixel i of ``ours`` covers the same place as sub-pixel i * theirs / ours, measured at the centres.
    nearest = ((torch.arange(ours) + 0.5) * theirs / ours).long()
    grid = other.unflatten(0, (channels, theirs, theirs))
    return grid[:, nearest][:, :, nearest].flatten(0, 2)
