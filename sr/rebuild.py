"""From the tensors of a weights file to the network they belong to, or to the reason why there is none."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sr.archs.external import SpandrelNetwork, recognise
from sr.errors import SRError
from sr.network import SRNetwork
from sr.registry import create_model, did_you_mean, get_arch, list_archs, list_models
from sr.weightfiles import WeightFile, WeightSet, info_of

# What building a network may take beside what its weights take: some make masks and tables for attention.
_MOST_BYTES = 1 << 27
_BYTES_PER_BYTE = 16
_MOST_CALLS = 100_000
_HARMLESS = 1 << 18  # elements: what cannot have more is not computed twice
_INITIALISERS = {"kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "orthogonal_"}
_DRAWS = {"uniform_", "normal_"}
# What a file can make the code that reads it trip over.
_TRIPPED = (LookupError, ValueError, ArithmeticError, TypeError, RuntimeError, AttributeError, AssertionError)
_SETS = 8  # of a file that fits nothing: as many are compared, and a model is near if one in as many tensors fits
_SCALES = (2, 3, 4)


@dataclass
class Report:
    """What a weights file is, and what becomes of it.

    Attributes:
        path: the file.
        format: of the file, in words.
        size: in bytes.
        problem: why it does not load; empty if it does.
        unwrapped: wrappers and prefixes around the weights that were taken, from the outside.
        averaged: whether these are an average over training (EMA).
        others: further sets of weights in the file.
        ignored: entries that are no weights.
        arch: architecture; spandrel's name for one of its own. Empty if nothing recognised the weights.
        hparams: its hyper-parameters, stored or inferred.
        inferred: whether they were read off names and shapes.
        scale: output edge / input edge.
        channels: of input and output.
        range: of input and output, in the project's contract.
        parameters: their number.
        renamed: how many tensors have other names in this implementation.
        fitting: how many tensors fit the network.
        missing: tensors that the network needs and the file lacks.
        misshapen: tensors of another shape or kind than the network needs.
        unexpected: tensors for which the network has no place.
        nearest: the network that is most like the weights, if they do not load.
        metadata: what the file says of itself.
    """

    path: str
    format: str
    size: int
    problem: str = ""
    unwrapped: list[str] = field(default_factory=list)
    averaged: bool = False
    others: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    arch: str = ""
    hparams: dict[str, Any] = field(default_factory=dict)
    inferred: bool = False
    scale: int | None = None
    channels: int | None = None
    range: str = "[0, 1]"
    parameters: int | None = None
    renamed: int = 0
    fitting: int = 0
    missing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    nearest: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(f"{name:<13}{text}" for name, text in self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        yield "file", f"{self.path} ({self.format}, {self.size} bytes)"
        yield "loads", f"no: {self.problem}" if self.problem else "yes"
        if self.arch:
            arguments = ", ".join(f"{key}={value!r}" for key, value in self.hparams.items())
            yield "network", f"{self.arch}({arguments})"
            yield "", "hyper-parameters " + ("inferred from names and shapes" if self.inferred else "from the file")
        if self.scale is not None:
            count = "" if self.parameters is None else f", {self.parameters} parameters"
            yield "", f"x{self.scale}, {self.channels} channels in {self.range}{count}"
        if self.arch or self.nearest:
            yield "weights", "averaged (EMA)" if self.averaged else "as trained, or not marked as averaged"
            yield "", f"{self.fitting} tensors fit, {self.renamed} renamed"
        for name in ("unwrapped", "others", "ignored", "missing", "misshapen", "unexpected"):
            if entries := getattr(self, name):
                yield name, ", ".join(entries)
        if self.nearest:
            yield "nearest", self.nearest
        for key, value in self.metadata.items():
            text = value if isinstance(value, str) else json.dumps(value)
            yield key, text.replace("\n", "\n" + " " * 13)


def rebuild(file: WeightFile, which: str | None = None) -> tuple[SRNetwork | None, Report]:
    """The network of a file with its weights, or ``None``; the report says why.

    Args:
        file: its weights are not copied if the network has the same names for them.
        which: as in :func:`sr.checkpoint.load`.

    Raises:
        SRError: there are no such weights in the file.
    """
    size = file.path.stat().st_size
    report = Report(str(file.path), file.format, size, ignored=file.ignored, metadata=_shown(file.metadata))
    chosen = _choose(file, which)
    guard = _Guard(_MOST_BYTES + _BYTES_PER_BYTE * size)
    named = "arch" in file.metadata
    found = next(_by_name(file, chosen[0], report) if named else _recognised(chosen, guard, report), None)
    weights = found[0] if found else chosen[0]
    report.unwrapped, report.averaged = list(weights.where), weights.averaged
    report.others = sorted({_name(s) for s in file.sets if s.wrapper[:1] != weights.wrapper[:1]})
    if found is None:
        first = next(iter(weights.tensors))
        reason = f"no architecture of this project or of spandrel has such weights (first key: {first!r})"
        report.problem = report.problem or reason
        report.nearest = _nearest(chosen, guard, report)
        report.problem += f"; closest: {report.nearest}" if report.nearest else ""
        return None, report
    _, arch, hparams, tensors = found
    report.problem = ""
    report.inferred = not named
    report.arch, report.hparams = hparams.get("arch", arch.__name__), hparams
    known = set(weights.tensors) | {f"network.{key}" for key in weights.tensors}  # spandrel's are one level down
    report.renamed = len(set(tensors) - known)
    try:
        with guard:
            network = arch(**hparams)
    except (SRError, MemoryError, *_TRIPPED) as e:
        report.problem = f"its hyper-parameters do not fit {arch.__name__} ({' '.join(str(e).split())[:300]})"
        return None, report
    report.scale, report.channels = network.scale, network.in_channels
    report.parameters = sum(p.numel() for p in network.parameters())
    report.problem = _compare(network, tensors, report, report.arch)
    if report.problem:
        return None, report
    network.load_state_dict(tensors)
    if bad := _not_finite(network):
        report.problem = f"{bad!r} holds values that are not finite; the training that made it diverged"
        return None, report
    return network, report


def _shown(metadata: Mapping[str, str]) -> dict[str, Any]:
    """What a file says of itself, but for what the report has in other places."""
    own = ("format", "arch", "hparams", "scale", "info", "digest", "in_channels", "range")
    return {key: value for key, value in metadata.items() if key not in own} | info_of(metadata)


def _name(weights: WeightSet) -> str:
    return "/".join(part.rstrip(".") for part in weights.wrapper) or "top level"


def _choose(file: WeightFile, which: str | None) -> list[WeightSet]:
    def fits(weights: WeightSet) -> bool:
        if which in ("ema", "raw"):
            return weights.averaged == (which == "ema")
        return which is None or any(which in (part, part.rstrip(".")) for part in weights.where)

    chosen = [weights for weights in file.sets if fits(weights)]
    if not chosen:
        names = sorted({f"{_name(s)} ({'ema' if s.averaged else 'raw'})" for s in file.sets})
        raise SRError(f"{file.path} has no weights {which!r}; it has {', '.join(names[:12])}")
    return chosen


Found = tuple[WeightSet, type[SRNetwork], dict[str, Any], dict[str, Tensor]]


def _by_name(file: WeightFile, weights: WeightSet, report: Report) -> Iterator[Found]:
    """The network that the file names."""
    try:
        arch = get_arch(file.metadata["arch"])
        yield weights, arch, dict(json.loads(file.metadata["hparams"])), arch.upgrade(weights.tensors)
    except SRError as e:
        report.problem = str(e)
    except _TRIPPED as e:
        report.problem = f"its hyper-parameters do not fit {arch.__name__} ({e})"


def _recognised(chosen: list[WeightSet], guard: _Guard, report: Report) -> Iterator[Found]:
    """The networks that the sets of tensors belong to: the project's architectures come first."""
    for weights in chosen:
        for arch in map(get_arch, list_archs()):
            try:
                with guard:
                    hparams = arch.infer_hparams(weights.tensors)
                    tensors = {} if hparams is None else arch.remap(weights.tensors)
            except (SRError, MemoryError, *_TRIPPED):  # names like this architecture's, with other shapes
                continue
            if hparams is not None:
                yield weights, arch, hparams, tensors
    for weights in chosen:
        try:
            with guard:
                found = recognise(weights.tensors)
        except SRError as e:
            report.problem = report.problem or str(e)
            continue
        if found is not None:
            yield weights, SpandrelNetwork, *found


def _compare(network: SRNetwork, tensors: Mapping[str, Tensor], report: Report, name: str) -> str:
    """Note what fits and what does not. Everything must, since a half-random network paints garbage."""
    own = network.state_dict()
    report.missing = [key for key in own if key not in tensors]
    report.unexpected = [key for key in tensors if key not in own]
    report.misshapen = []
    for key in own.keys() & tensors.keys():
        here, there = own[key], tensors[key]
        if there.shape != here.shape:
            report.misshapen.append(f"{key!r} has shape {tuple(there.shape)}, needed is {tuple(here.shape)}")
        elif there.is_floating_point() != here.is_floating_point():
            report.misshapen.append(f"{key!r} is {there.dtype}, needed is {here.dtype}")
    report.misshapen.sort()
    report.fitting = len(own) - len(report.missing) - len(report.misshapen)
    fit = f"({report.fitting} of {len(own)} tensors fit)"
    if report.missing:
        key, more = report.missing[0], len(report.missing) - 1
        others = f", and {more} more" if more else ""
        return f"{name} needs {key!r}, which the file lacks{others} {fit}{did_you_mean(key, report.unexpected[:1000])}"
    if report.misshapen:
        return f"{report.misshapen[0]} by {name} {fit}"
    if report.unexpected:
        return f"{name} has no place for {len(report.unexpected)} tensors, first {report.unexpected[0]!r} {fit}"
    return ""


def _not_finite(network: SRNetwork) -> str:
    """The first weight that is NaN or infinite; a buffer may be infinite, as a mask is."""
    for name, parameter in network.named_parameters():
        if not parameter.isfinite().all():
            return name
    return next((name for name, buffer in network.named_buffers() if buffer.isnan().any()), "")


def _nearest(chosen: list[WeightSet], guard: _Guard, report: Report) -> str:
    """The model of the project that most tensors fit, by name and shape, among all prefixes; may be none."""

    def count(network: SRNetwork, weights: WeightSet) -> int:
        shapes = {key: value.shape for key, value in network.state_dict().items()}
        return sum(shapes.get(key) == value.shape for key, value in weights.tensors.items())

    def build(model: str, scale: int) -> SRNetwork | None:
        try:
            with guard:
                return create_model(model, scale=scale)
        except SRError:  # not made for that scale
            return None

    def best(models: list[tuple[str, int]]) -> tuple[int, str, int, WeightSet]:
        rated = [(0, "", 0, chosen[0])]
        for model, scale in models:
            if (network := build(model, scale)) is not None:
                rated += [(count(network, weights), model, scale, weights) for weights in chosen[:_SETS]]
        return max(rated, key=lambda entry: entry[0])

    _, model, _, _ = best([(model, _SCALES[-1]) for model in list_models()])
    fitting, model, scale, weights = best([(model, scale) for scale in _SCALES] if model else [])
    network = build(model, scale) if model else None
    if network is None or fitting * _SETS < len(network.state_dict()):
        return ""
    return _compare(network, weights.tensors, report, f"{model} x{scale}")


class _Guard(TorchFunctionMode):
    """While a network is built: what a file asks for stays within bounds, and weights are not drawn at random.

    An operation that may be large is first done on the meta device, which computes shapes and takes no memory.

    Args:
        limit: bytes that all results may take together.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.calls = self.bytes = 0

    def __enter__(self) -> Any:
        self.calls = self.bytes = 0
        return super().__enter__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        self.calls += 1
        if self.calls > _MOST_CALLS:
            raise SRError("it asks for a network of far more parts than it has weights for")
        if name in _INITIALISERS | _DRAWS:  # the weights come from the file
            tensor: Tensor = args[0] if args else kwargs["tensor"]
            if name in _DRAWS:  # trunc_normal_ draws until it likes what it gets: zeros, but not what memory held
                with torch.no_grad():
                    tensor.zero_()
            return tensor
        if name.endswith("_"):  # in place, or an attribute
            return func(*args, **kwargs)
        if _bound((*args, *kwargs.values())) > _HARMLESS:
            expected = 0
            with contextlib.suppress(*_TRIPPED), torch.device("meta"):  # what asks for values stays unknown here
                on_meta = {key: _on_meta(value) for key, value in kwargs.items() if key != "device"}
                expected = _bytes(func(*_on_meta(args), **on_meta))
            self._check(self.bytes + expected)
        result = func(*args, **kwargs)
        self.bytes += _bytes(result)
        self._check(self.bytes)
        return result

    def _check(self, total: int) -> None:
        if total > self.limit:
            raise SRError("it asks for a network of far more memory than it has weights for")


def _bytes(result: Any) -> int:
    parts = result if isinstance(result, tuple | list) else (result,)
    return sum(part.untyped_storage().nbytes() for part in parts if isinstance(part, Tensor))


def _bound(values: Iterable[Any]) -> float:
    """About as many elements has at most what is made of these; tensors of one shape are taken element by element."""
    shapes: set[tuple[int, ...]] = set()
    numbers = 1.0
    for value in values:
        if isinstance(value, Tensor):
            shapes.add(tuple(value.shape))
        elif isinstance(value, int | float):
            numbers *= max(abs(value), 1)
        elif isinstance(value, tuple | list):
            numbers *= _bound(value)
    return numbers * math.prod(math.prod(shape) or 1 for shape in shapes)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    return type(value)(map(_on_meta, value)) if type(value) in (tuple, list) else value
