"""Weights for other tools: ONNX, ``torch.export``, and ``.pth`` as BasicSR writes it.

Each of them is read back and compared with the network before it gets its name, so that what is there works.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sr.archs.external import SpandrelNetwork
from sr.checkpoint import describe, load
from sr.errors import SRError
from sr.network import SRNetwork

_EXAMPLE = (2, 24, 40)  # batch, height and width that a graph is recorded with; none of them is 1, which would stay 1
_CHECKED = ((1, 1, 1), (3, 7, 50), (1, 49, 33))  # those at which it is compared
# In float32 and in float16, of values whose range is 1. Float16 keeps 11 bits, which cost networks about 1e-3, and
# SparseSR up to 3e-3 where two windows are so similar that it chooses the other one.
_TOLERANCE = {False: 1e-4, True: 2 / 255}
_AXES = ("batch", "height", "width")
_OPSET = 18


def export_onnx(
    network: SRNetwork,
    path: str | Path,
    *,
    half: bool = False,
    opset: int = _OPSET,
    metadata: Mapping[str, str] | None = None,
) -> float:
    """Write an ONNX file for pictures of any size, and compare it in onnxruntime with the network.

    Its input ``lq`` is float32 (batch, 3, height, width), RGB, [0, 1]; its output ``sr`` (batch, 3, scale*height,
    scale*width), not clamped. Its metadata say what network it is (:func:`sr.checkpoint.describe`), ``colour`` and
    ``precision``.

    Args:
        network: any network of the project.
        path: the file, ``.onnx``; replaced if it is there.
        half: weights and computation in float16, which halves the file; input and output stay float32.
        opset: version of ONNX's operators, at least 18.
        metadata: more to write into the file, e.g. ``licence``.

    Returns:
        The largest difference of a value from the network's, over three sizes other than the one of the recording.

    Raises:
        SRError: a package is missing, the network or the opset cannot be exported, the result differs, or the file
            cannot be written.
    """
    path = Path(path)
    check_path(path, ".onnx")
    try:
        onnx, runtime = (importlib.import_module(name) for name in ("onnx", "onnxruntime"))
        importlib.import_module("onnxscript")
    except ImportError as e:
        raise SRError(f"writing ONNX needs the package {e.name}: pip install -e '.[onnx]'") from e
    network = _deployed(network)
    module = _Half(copy.deepcopy(network)) if half else network
    with _quiet():
        try:
            program = torch.onnx.export(
                module,
                (_picture(*_EXAMPLE),),
                dynamo=True,
                dynamic_shapes=_free_shapes(),
                input_names=["lq"],
                output_names=["sr"],
                opset_version=opset,
                verbose=False,
            )
            model = program.model_proto  # type: ignore[union-attr]
        except Exception as e:  # the exporter runs the network's code on symbols, so anything may happen
            raise SRError(f"{_name(network)} cannot be exported to ONNX ({_first_line(e)})") from e
    written = next(entry.version for entry in model.opset_import if not entry.domain)
    if written != opset:
        raise SRError(f"{_name(network)} comes out in opset {written}, not {opset}; leave --opset out")
    _name_axes(model)
    own = {"colour": "RGB", "precision": "float16" if half else "float32"}
    onnx.helper.set_model_props(model, describe(network) | own | dict(metadata or {}))

    def run(lq: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"lq": lq.numpy()})[0])

    with _appearing(path) as part:
        part.write_bytes(model.SerializeToString())
        options = runtime.SessionOptions()
        options.log_severity_level = 3  # errors alone; they are raised as well
        try:
            session = runtime.InferenceSession(str(part), options, providers=["CPUExecutionProvider"])
            return _compare(network, run, _TOLERANCE[half])
        except SRError as e:
            raise SRError(f"{path} is not written: {e}{'; export without --fp16' if half else ''}") from e
        except Exception as e:  # onnxruntime's errors have no common base
            raise SRError(f"{path} is not written: onnxruntime does not run it ({_first_line(e)})") from e


def export_program(network: SRNetwork, path: str | Path) -> float:
    """Write what ``torch.export.load`` reads: the network's graph, for pictures of any size, and its weights.

    ``torch.export.load(path).module()(lq)`` is the network; input and output are those of :func:`export_onnx`. Of a
    network that works in windows (``multiple_of`` above 1) edges have to be longer than one window: ``torch.export``
    takes it for granted, as it records, that there are several, and its guards refuse smaller pictures.

    Args:
        network: any network of the project.
        path: the file, ``.pt2``; replaced if it is there.

    Returns:
        The largest difference of a value from the network's, over three sizes other than the one of the recording.

    Raises:
        SRError: the network cannot be exported, the result differs, or the file cannot be written.
    """
    path = Path(path)
    check_path(path, ".pt2")
    network = _deployed(network)
    with _quiet(), _appearing(path) as part:
        try:
            program = torch.export.export(network, (_picture(*_EXAMPLE),), dynamic_shapes=_free_shapes())
            torch.export.save(program, part, extra_files={"sr.json": json.dumps(describe(network))})
            smallest = 1 if network.multiple_of == 1 else network.multiple_of + 1
            return _compare(network, torch.export.load(part).module(), _TOLERANCE[False], smallest)
        except (SRError, OSError):
            raise
        except Exception as e:  # the exporter runs the network's code on symbols, so anything may happen
            raise SRError(f"{_name(network)} cannot be exported ({_first_line(e)})") from e


def export_pth(network: SRNetwork, path: str | Path, raw: SRNetwork | None = None) -> None:
    """Write a ``.pth`` as BasicSR does: ``params``, and ``params_ema`` where averaged weights stand beside raw ones.

    The names are the published ones, so that other tools know the network; of :class:`~sr.archs.SpandrelNetwork` they
    are those of the network inside. A network of this project's also leaves its description there, as ``sr_network``.

    Args:
        network: what inference uses.
        path: the file, ``.pth``; replaced if it is there.
        raw: the same network with the trained weights, if ``network`` has their average.

    Raises:
        SRError: the file would not give the same network back, or cannot be written.
    """
    path = Path(path)
    check_path(path, ".pth")
    content: dict[str, Any] = {"params": _published(raw or network)}
    if raw is not None:
        content["params_ema"] = _published(network)
    if not isinstance(network, SpandrelNetwork):  # that one is told by spandrel from names and shapes
        content["sr_network"] = describe(network)
    with _appearing(path) as part:
        torch.save(content, part)
        try:
            again = load(part)
        except SRError as e:
            reason = str(e).removeprefix(f"{part}: ")
            raise SRError(f"{path} is not written: it could not be read back ({reason})") from e
        own, other = network.state_dict(), again.state_dict()
        if own.keys() != other.keys() or not all(torch.equal(value.cpu(), other[key]) for key, value in own.items()):
            raise SRError(f"{path} is not written: it would read as {_name(again)}, not as this {_name(network)}")
        if again.hparams != network.hparams:  # spandrel may tell the same network by other words, or not know all
            _compare(_deployed(network), again.fuse(), _TOLERANCE[False])


def check_path(path: Path, suffix: str, inputs: Iterable[str | Path] = ()) -> None:
    """Find out before any work whether a file can be written.

    Args:
        path: the file to be written.
        suffix: what its name has to end with.
        inputs: files that it must not replace.

    Raises:
        SRError: another suffix, a missing folder, a folder of that name, or one of ``inputs``.
    """
    if path.suffix != suffix:
        raise SRError(f"{path}: the name of such a file ends with {suffix}")
    if not path.parent.is_dir():
        raise SRError(f"cannot write {path}: the folder {path.parent} does not exist; create it")
    if path.is_dir():
        raise SRError(f"cannot write {path}: a folder has this name; choose another")
    if any(path.resolve() == Path(i).resolve() for i in inputs):
        raise SRError(f"{path} is the input as well, and would be replaced; name another file with -o")


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A hidden file in the same folder, which gets its name at the end of the block, or goes."""
    part = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield part
        part.replace(path)
    except OSError as e:
        raise SRError(f"cannot write {path} ({e}); check the folder, its permissions and free space") from e
    finally:
        part.unlink(missing_ok=True)


class _Half(nn.Module):
    """A network that computes in float16, and takes and gives float32."""

    def __init__(self, network: SRNetwork) -> None:
        super().__init__()
        self.network = network.half()

    def forward(self, lq: Tensor) -> Tensor:
        sr: Tensor = self.network(lq.half())
        return sr.float()


def _deployed(network: SRNetwork) -> SRNetwork:
    """A copy without what only training needs, in float32 on the CPU."""
    return copy.deepcopy(network).float().cpu().eval().requires_grad_(False).fuse()


def _published(network: SRNetwork) -> dict[str, Tensor]:
    own = network.network if isinstance(network, SpandrelNetwork) else network
    return {key: value.detach().cpu().contiguous() for key, value in own.state_dict().items()}


def _free_shapes() -> tuple[dict[int, Any]]:
    return (dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC),)


def _picture(batch: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(batch, 3, height, width, generator=generator)


@torch.no_grad()
def _compare(network: SRNetwork, other: Callable[[Tensor], Tensor], tolerance: float, smallest: int = 1) -> float:
    """The largest difference between the two; SRError if it is more than ``tolerance``. No edge below ``smallest``."""
    largest = 0.0
    for batch, height, width in _CHECKED:
        size = batch, max(height, smallest), max(width, smallest)
        lq = _picture(*size)
        expected, result = network(lq), other(lq)
        if result.shape != expected.shape:
            raise SRError(f"it makes {tuple(result.shape)} of {tuple(lq.shape)}, not {tuple(expected.shape)}")
        difference = (result - expected).abs().max().item() / max(1.0, expected.abs().max().item())
        if not difference <= tolerance:  # NaN is not
            at = f"{size[2]}x{size[1]} pixels"
            raise SRError(f"at {at} it differs from the network by {difference:.2g}, allowed is {tolerance:g}")
        largest = max(largest, difference)
    return largest


def _name_axes(model: Any) -> None:
    """``batch``, ``height`` and ``width`` in place of the exporter's numbered symbols, wherever they occur."""
    entry = model.graph.input[0].type.tensor_type.shape.dim
    names = {entry[place].dim_param: name for place, name in zip((0, 2, 3), _AXES, strict=True)}
    symbols = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = symbols.sub(lambda m: names[m[0]], dim.dim_param)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' remarks on their own work."""
    loggers = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir", "torch.onnx", "torch.export")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _name(network: SRNetwork) -> str:
    return network.hparams["arch"] if isinstance(network, SpandrelNetwork) else network.arch


def _first_line(e: Exception) -> str:
    return str(e).strip().splitlines()[0][:200] if str(e).strip() else repr(e)
