"""Weights files: written so that they describe themselves, read without running anything that is in them.

A file written by :func:`save` is a safetensors file whose metadata name the architecture and its hyper-parameters,
so that :func:`load` needs nothing else. Published files are read for architectures that recognise their own keys
(:meth:`sr.network.SRNetwork.infer_hparams`), and else for those that spandrel knows (:mod:`sr.archs.external`).
"""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

import sr
import sr.archs  # registers every architecture
from sr.archs.external import SpandrelNetwork, recognise
from sr.errors import SRError
from sr.network import SRNetwork
from sr.registry import did_you_mean, get_arch, list_archs
from sr.weights import find_weights

_SUFFIXES = (".safetensors", ".pth", ".pt", ".ckpt")
# Where training tools keep the weights inside a file, the averaged ones first.
_WRAPPERS = (
    *("params_ema", "params-ema", "generator_ema", "ema"),
    *("params", "state_dict", "model_state_dict", "model", "net", "net_g", "generator"),
)
_PREFIXES = ("module.", "_orig_mod.")
# What a training tool puts before all names; dropped only if nothing is recognised with it, since ESRGAN's have one.
_COMMON_PREFIXES = ("model.", "net.", "net_g.", "netG.", "generator.", "ema_model.")


def describe(network: SRNetwork) -> dict[str, str]:
    """What a file must say to rebuild ``network``: architecture, hyper-parameters, scale."""
    return {
        "format": "sr",
        "version": sr.__version__,
        "arch": network.arch,
        "hparams": json.dumps(network.hparams),
        "scale": str(network.scale),
    }


def save(network: SRNetwork, path: str | Path, info: Mapping[str, Any] | None = None) -> None:
    """Write ``network`` to a self-describing safetensors file, whole or not at all.

    Args:
        network: any network of the project.
        path: the file; its folder must exist.
        info: more to keep in the metadata (recipe, step, metrics ...), anything that JSON can hold.
    """
    path = Path(path)
    tensors = {k: v.detach().cpu().contiguous() for k, v in network.state_dict().items()}
    metadata = describe(network) | {"info": json.dumps(dict(info or {}))}
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(to_bytes(tensors, metadata))  # save_file would leave a file that only its owner may read
        part.replace(path)
    except OSError as e:
        raise SRError(f"cannot write {path} ({e}); check the folder, its permissions and free space") from e
    finally:
        part.unlink(missing_ok=True)


def load(source: str | Path, device: str | torch.device = "cpu") -> SRNetwork:
    """Load a network with its weights, ready for inference.

    Args:
        source: a weights file (``.safetensors`` of this project, ``.ckpt`` of a training run, a published file of an
            architecture that this project or spandrel knows), or the name of weights that are installed or published
            (:func:`sr.weights.list_weights`), e.g. ``sparsesr_t_x2.quickstart`` or ``imdn_x4``.
        device: where the network goes.

    Returns:
        The network in evaluation mode; averaged (EMA) weights are preferred where a file holds both.

    Raises:
        SRError: the file is missing, damaged, not a weights file, holds code, or does not fit the network exactly.
    """
    path = _resolve(source)
    metadata, tensors = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    network, tensors = _build(metadata, tensors, path)
    _fill(network, tensors, path)
    return network.eval().requires_grad_(False).to(device)


def resume_step(path: str | Path, network: SRNetwork) -> int:
    """The step at which a training checkpoint of ``network`` was written.

    Raises:
        SRError: the file is no checkpoint of :mod:`sr.module`, is damaged, or belongs to another network.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        raise SRError(f"{path} holds weights only, not the state of a run; resume from checkpoints/last.ckpt")
    content = _read_torch(path)
    if not isinstance(content, dict) or not {"sr_network", "state_dict", "global_step"} <= content.keys():
        raise SRError(f"{path} is no checkpoint of a training run; resume from checkpoints/last.ckpt")
    own, stored = describe(network), content["sr_network"]
    theirs = {"arch": stored.get("arch"), **json.loads(stored.get("hparams", "{}"))}
    ours = {"arch": own["arch"], **json.loads(own["hparams"])}
    other = [f"{key} {theirs.get(key)} there, {value} here" for key, value in ours.items() if theirs.get(key) != value]
    if other:
        raise SRError(f"{path} belongs to another network: {'; '.join(other[:5])}")
    return int(content["global_step"])


def read_info(source: str | Path) -> dict[str, Any]:
    """The metadata of a file written by :func:`save`: architecture, hyper-parameters, and what ``info`` held."""
    metadata, _ = _read_safetensors(_resolve(source))
    decode = {k: json.loads(metadata[k]) for k in ("hparams", "info") if k in metadata}
    return metadata | decode


def _resolve(source: str | Path) -> Path:
    path = Path(source)
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise SRError(f"{path}: not a weights file (expected {', '.join(_SUFFIXES)})")
        return path
    if path.is_dir():
        raise SRError(f"{path} is a folder; name the weights file in it")
    if path.suffix in _SUFFIXES and path.name not in ("", path.suffix):
        raise SRError(f"no weights file at {path}")
    return find_weights(str(source)).obtain()


def _read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {}), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, struct.error) as e:
        raise SRError(f"{path}: damaged, or not a safetensors file ({e})") from e


def _read_torch(path: Path) -> Any:
    """What a file of ``torch.save`` holds, as long as it is plain tensors and containers."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:
        wanted = next((line.strip() for line in str(e).splitlines() if "GLOBAL" in line), "it is not plain tensors")
        raise SRError(f"{path}: refused, since reading it would run code from the file ({wanted})") from e
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError) as e:
        raise SRError(f"{path}: damaged, or not a PyTorch file ({str(e).splitlines()[0] if str(e) else e!r})") from e


def _read_pickle(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    content = _read_torch(path)
    metadata: dict[str, str] = {}
    if isinstance(content, dict) and isinstance(content.get("sr_network"), dict):  # a checkpoint of sr.module
        metadata, state = dict(content["sr_network"]), dict(content.get("state_dict", {}))
        part = "ema." if any(key.startswith("ema.") for key in state) else "network."
        return metadata, {key[len(part) :]: value for key, value in state.items() if key.startswith(part)}
    for wrapper in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
            break
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()) or not content:
        raise SRError(f"{path}: no weights found in it")
    return metadata, content


def _strip(key: str) -> str:
    while key.startswith(_PREFIXES):
        key = key.split(".", 1)[1]
    return key


def _unprefixed(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors under their bare names, then without each prefix that all names share."""
    tensors = {_strip(key): value for key, value in tensors.items()}
    yield tensors
    while tensors and (prefix := next((p for p in _COMMON_PREFIXES if all(k.startswith(p) for k in tensors)), None)):
        tensors = {_strip(key[len(prefix) :]): value for key, value in tensors.items()}
        yield tensors


def _build(metadata: Mapping[str, str], tensors: dict[str, Tensor], path: Path) -> tuple[SRNetwork, dict[str, Tensor]]:
    """The network with random weights, and the tensors under this implementation's names."""
    if "arch" in metadata:
        arch = get_arch(metadata["arch"])
        try:
            return arch(**json.loads(metadata["hparams"])), arch.upgrade(tensors)
        except (TypeError, LookupError, ValueError, RuntimeError, ArithmeticError, AttributeError, AssertionError) as e:
            raise SRError(f"{path}: its hyper-parameters do not fit {arch.__name__} ({e})") from e
    for bare in _unprefixed(tensors):
        for name in list_archs():
            arch = get_arch(name)
            hparams = arch.infer_hparams(bare)
            if hparams is not None:
                return arch(**hparams), arch.remap(bare)
    for bare in _unprefixed(tensors):
        try:
            found = recognise(bare)
        except SRError as e:
            raise SRError(f"{path}: {e}") from e
        if found is not None:
            return SpandrelNetwork(**found[0]), found[1]
    first = next(iter(tensors), None)
    raise SRError(f"{path}: no architecture of this project or of spandrel has such weights (first key: {first!r})")


def _fill(network: SRNetwork, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy the weights in; everything must fit, since a half-random network paints garbage."""
    own = network.state_dict()
    for key, value in own.items():
        if key not in tensors:
            raise SRError(
                f"{path}: {type(network).__name__} needs {key!r}, which the file lacks{did_you_mean(key, tensors)}"
            )
        if tensors[key].shape != value.shape:
            raise SRError(f"{path}: {key!r} has shape {tuple(tensors[key].shape)}, needed is {tuple(value.shape)}")
    extra = [key for key in tensors if key not in own]
    if extra:
        raise SRError(f"{path}: {type(network).__name__} has no place for {len(extra)} tensors, first {extra[0]!r}")
    network.load_state_dict(tensors)
