"""Weights files: written so that they describe themselves, read without running anything that is in them.

A file written by :func:`save` is a safetensors file whose metadata name the architecture and its hyper-parameters,
so that :func:`load` needs nothing else, and have a digest of the whole. Other files are opened by
:mod:`sr.weightfiles`, and recognised by :mod:`sr.rebuild`: by architectures that know their own keys
(:meth:`sr.network.SRNetwork.infer_hparams`), and else by spandrel (:mod:`sr.archs.external`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes

import sr
import sr.archs  # registers every architecture
from sr.atomic import atomic
from sr.errors import SRError
from sr.network import SRNetwork
from sr.onnx_network import OnnxNetwork
from sr.rebuild import Report, rebuild
from sr.weightfiles import SUFFIXES, digest, info_of, read, read_torch
from sr.weights import find_weights

_ONNX = ".onnx"
# First words of a module's state that not every run has, and the options that decide.
_OPTIONAL_PARTS = {"ema": "an average (model.ema_decay)", "adversarial": "a discriminator (model.adversarial)"}


def describe(network: SRNetwork) -> dict[str, str]:
    """What a file must say to rebuild ``network``: architecture, hyper-parameters, scale, channels, range."""
    return {
        "format": "sr",
        "version": sr.__version__,
        "arch": network.arch,
        "hparams": json.dumps(network.hparams),
        "scale": str(network.scale),
        "in_channels": str(network.in_channels),
        "range": "[0, 1]",
    }


def save(network: SRNetwork, path: str | Path, info: Mapping[str, Any] | None = None) -> None:
    """Write ``network`` to a self-describing safetensors file, whole or not at all.

    Args:
        network: any network of the project.
        path: the file; its folder must exist.
        info: more to keep in the metadata (recipe, step, metrics, licence ...), anything that JSON can hold;
            ``averaged`` tells whether the weights are an average over training.
    """
    if isinstance(network, OnnxNetwork):
        raise SRError(f"{network.path} is an ONNX file, which has no weights that could be saved")
    path = Path(path)
    tensors = {k: v.detach().cpu().contiguous() for k, v in network.state_dict().items()}
    metadata = describe(network) | {"info": json.dumps(dict(info or {}))}
    metadata["digest"] = digest(metadata, tensors)
    with atomic(path) as file:
        file.write(to_bytes(tensors, metadata))  # save_file would leave a file that only its owner may read


def load(source: str | Path, device: str | torch.device = "cpu", which: str | None = None) -> SRNetwork:
    """Load a network with its weights, ready for inference.

    Args:
        source: a weights file (``.safetensors`` of this project, ``.ckpt`` of a training run, a published file of an
            architecture that this project or spandrel knows, ``.onnx``), or the name of weights that are installed or
            published (:func:`sr.weights.list_weights`), e.g. ``sparsesr_t_x2.quickstart`` or ``imdn_x4``.
        device: where the network goes.
        which: of a file with several sets of weights: ``ema`` (averaged over training), ``raw`` (as trained), or what
            its author called them, e.g. ``net_g``. Default: averaged ones if there are any.

    Returns:
        The network in evaluation mode.

    Raises:
        SRError: the file is missing, damaged, not a weights file, holds code, or does not fit the network exactly.
    """
    path = _resolve(source)
    if path.suffix == _ONNX:
        return OnnxNetwork(path=str(path), device=str(device)).eval()
    network, report = rebuild(read(path), which)
    if network is None:
        raise SRError(f"{path}: {report.problem}")
    return network.eval().requires_grad_(False).to(device)


def inspect(source: str | Path, which: str | None = None) -> Report:
    """What a weights file is and whether it loads; see :class:`sr.rebuild.Report`. Arguments as in :func:`load`.

    Raises:
        SRError: the file cannot be read at all: it is missing, damaged, not a weights file, or holds code.
    """
    path = _resolve(source)
    if path.suffix != _ONNX:
        return rebuild(read(path), which)[1]
    report = Report(str(path), "ONNX", path.stat().st_size, arch=OnnxNetwork.__name__)
    try:
        network = OnnxNetwork(path=str(path))
    except SRError as e:
        report.problem = str(e).removeprefix(f"{path}: ")
    else:
        report.scale, report.channels = network.scale, network.in_channels
    return report


def resume_step(path: str | Path, network: SRNetwork, parts: Collection[str] | None = None) -> int:
    """The step at which a training checkpoint of ``network`` was written.

    Args:
        path: the checkpoint.
        network: what is trained.
        parts: of the module that is to go on from it: first words of the keys of its state. Default: not compared.

    Raises:
        SRError: the file is no checkpoint of :mod:`sr.module`, is damaged, or belongs to another network, or to a
            module with other parts.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        raise SRError(f"{path} holds weights only, not the state of a run; resume from checkpoints/last.ckpt")
    content = read_torch(path)
    if not isinstance(content, dict) or not {"sr_network", "state_dict", "global_step"} <= content.keys():
        raise SRError(f"{path} is no checkpoint of a training run; resume from checkpoints/last.ckpt")
    own, stored = describe(network), content["sr_network"]
    if not isinstance(stored, dict):
        raise SRError(f"{path} does not say which network it is of; it is damaged, or no checkpoint of a training run")
    theirs = {"arch": stored.get("arch"), **info_of(stored, "hparams")}
    ours = {"arch": own["arch"], **json.loads(own["hparams"])}
    other = [f"{key} {theirs.get(key)} there, {value} here" for key, value in ours.items() if theirs.get(key) != value]
    if other:
        raise SRError(f"{path} belongs to another network: {'; '.join(other[:5])}")
    stored_parts = {key.partition(".")[0] for key in content["state_dict"]}
    for part, option in _OPTIONAL_PARTS.items():
        there = part in stored_parts
        if parts is not None and there != (part in parts):
            this, that = ("with", "without") if there else ("without", "with")
            raise SRError(
                f"{path} is of a run {this} {option}, and cannot be continued {that} it;\n"
                "start a new run from its weights with --model.weights"
            )
    return int(content["global_step"])


def read_info(source: str | Path) -> dict[str, Any]:
    """The metadata of a file written by :func:`save`: architecture, hyper-parameters, and what ``info`` held."""
    metadata = read(_resolve(source)).metadata
    return metadata | {key: info_of(metadata, key) for key in ("hparams", "info") if key in metadata}


def _resolve(source: str | Path) -> Path:
    path = Path(source)
    if path.is_file():
        if path.suffix not in (*SUFFIXES, _ONNX):
            raise SRError(f"{path}: not a weights file (expected {', '.join((*SUFFIXES, _ONNX))})")
        return path
    if path.is_dir():
        raise SRError(f"{path} is a folder; name the weights file in it")
    if path.exists():
        raise SRError(f"{path} is not a file, but a device or a pipe")
    if path.suffix in (*SUFFIXES, _ONNX) and path.name not in ("", path.suffix):
        raise SRError(f"no {'ONNX' if path.suffix == _ONNX else 'weights'} file at {path}")
    return find_weights(str(source)).obtain()
