"""Opening weights files of any origin: which sets of tensors they hold, and nothing of them is run or believed.

A file is looked through before a library gets to read it: pickles may ask for tensors and plain containers only, an
archive and a tensor may not claim more than the file holds, and checksums have to agree where there are any.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sr.errors import SRError

SUFFIXES = (".safetensors", ".pth", ".pt", ".ckpt")
# Where training tools keep the weights inside a file.
_AVERAGED = (
    *("params_ema", "params-ema", "generator_ema", "ema", "net_g_ema", "model_ema", "ema_model", "state_dict_ema"),
    "ema_state_dict",
)
_WRAPPERS = (
    *_AVERAGED,
    *("params", "state_dict", "model_state_dict", "model", "net", "net_g", "generator", "network"),
    "current_model_state",  # of Lightning's WeightAveraging, which has the averaged ones in state_dict
)
# What tools put before names: anywhere; at the start of all names; at the start of those of one network of several.
_INSERTED = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_PREFIX = "module."
_GROUPS = tuple(f"{name}." for name in (*_AVERAGED, *("network", "model", "net", "net_g", "netG", "generator")))
_AVERAGES_ONLY = "n_averaged"  # the count that torch.optim.swa_utils.AveragedModel keeps beside the weights
_DEEPEST = 8  # wrappers, or prefixes, around weights

# What a pickle of tensors asks for. Much that torch.load accepts with weights_only is not here: sparse and quantised
# tensors, and bytearray, which takes any amount of memory.
_PLAIN = re.compile(
    r"collections\.(OrderedDict|Counter)|builtins\.(set|complex)|__builtin__\.(set|complex)|_codecs\.encode"
    r"|torch\._utils\._rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state)"
    r"|torch\._tensor\._rebuild_from_type_v2|torch\.nn\.parameter\.Parameter"
    r"|torch\.(Size|device|Tensor|bool|bfloat16|(u?int|float|complex)\d+\w*|\w+Storage)"
    r"|torch\.storage\.(Untyped|Typed)Storage"
)
_MOST_OPERATIONS = 1_000_000  # of a pickle: 40,000 tensors; it takes about two seconds
_LARGEST_HEADER = 1 << 24  # bytes, of a safetensors file: 100,000 tensors
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickle of the number that torch.save began with before 1.6
_LEGACY_PICKLES = 5
_SLACK = 4  # tied and expanded tensors claim as many times what is stored
_LARGEST_EMPTY = 1024  # edge of a tensor without elements, which may claim any; some transformers have such
_SHOWN = 6


@dataclass
class WeightSet:
    """Tensors that could be one network's.

    Attributes:
        where: wrappers and prefixes around them, from the outside.
        averaged: whether they are an average over training (EMA, SWA).
        tensors: under what is left of their names.
    """

    where: tuple[str, ...]
    averaged: bool
    tensors: dict[str, Tensor]

    @property
    def wrapper(self) -> tuple[str, ...]:
        """The part of ``where`` that tells sets apart."""
        return tuple(part for part in self.where if part not in (_PREFIX, "_orig_mod."))


@dataclass
class WeightFile:
    """What a file holds.

    Attributes:
        path: the file.
        format: in words.
        metadata: what the file says of itself.
        sets: averaged ones first; several may be the same tensors with more of their names taken for prefixes.
        ignored: entries beside the weights.
    """

    path: Path
    format: str
    metadata: dict[str, str] = field(default_factory=dict)
    sets: list[WeightSet] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def read(path: Path) -> WeightFile:
    """Open a weights file.

    Raises:
        SRError: it is damaged, claims more than it holds, asks for code, or holds no weights.
    """
    kind, size = _sniff(path), path.stat().st_size
    if kind == "safetensors":
        metadata, tensors = _read_safetensors(path, size)
        file = WeightFile(path, "safetensors", metadata)
        if "digest" in metadata and metadata["digest"] != digest(metadata, tensors):
            raise SRError(f"{path}: damaged (it differs from its digest); get the file again")
        if "arch" in metadata:  # written by this project
            file.sets = [WeightSet((), info_of(metadata).get("averaged") is True, tensors)]
        else:
            file.sets = list(_spread(tensors, (), False))
    else:
        content = read_torch(path)
        file = WeightFile(path, "PyTorch zip" if kind == "zip" else "PyTorch before 1.6")
        if not isinstance(content, Mapping):
            raise SRError(f"{path}: no weights found in it, but a {type(content).__name__}")
        if isinstance(content.get("sr_network"), dict):
            file.metadata = {str(key): str(value) for key, value in content["sr_network"].items()}
        if file.metadata and "params" not in content:
            _take_apart(content, file)
        else:
            for where, averaged, found in _unwrap(content, (), False, set()):
                file.sets += _spread(found, where, averaged)
        file.ignored = [str(key) for key, value in content.items() if not isinstance(value, Mapping | Tensor)]
    file.sets = sorted((s for s in file.sets if s.tensors), key=lambda s: not s.averaged)
    if not file.sets:
        raise SRError(f"{path}: no weights found in it{_list(file.ignored, ', but ')}")
    for weights in file.sets:
        _check_claims(weights.tensors, path, size)
    return file


def info_of(metadata: Mapping[str, str], key: str = "info") -> dict[str, Any]:
    """What a self-describing file says beyond what rebuilds the network; empty if that cannot be read."""
    try:
        info = json.loads(metadata.get(key, "{}"))
    except ValueError:
        return {}
    return info if isinstance(info, dict) else {}


def digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of all that a file written by the project says and holds, the digest itself left out."""
    total = hashlib.sha256(json.dumps(sorted((k, v) for k, v in metadata.items() if k != "digest")).encode())
    for name, value in sorted(tensors.items()):
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def read_torch(path: Path) -> Any:
    """What a file of ``torch.save`` holds, as long as it is plain tensors and containers.

    Raises:
        SRError: it is damaged, claims more than it holds, or asks for code.
    """
    zipped = _sniff(path) == "zip"
    try:
        if zipped:
            _check_zip(path)
        else:
            _check_legacy(path)
    except SRError:
        raise
    except Exception as e:  # zipfile and mmap raise what a damaged file makes them trip over
        raise _damaged(path, "PyTorch", e) from e
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # the same
        raise _damaged(path, "PyTorch", e) from e


def _sniff(path: Path) -> str:
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as e:
        raise SRError(f"cannot read {path} ({e.strerror})") from e
    if start.startswith(b"PK\x03\x04"):
        return "zip"
    return "safetensors" if start[8:] == b"{" or path.suffix == ".safetensors" else "legacy"


def _damaged(path: Path, kind: str, e: Exception) -> SRError:
    reason = " ".join(str(e).split())
    return SRError(f"{path}: damaged, or not a {kind} file ({reason[:200] or type(e).__name__})")


def _list(names: list[str], before: str = "") -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return before + ", ".join(name[:80] for name in names[:_SHOWN]) + more if names else ""


def _read_safetensors(path: Path, size: int) -> tuple[dict[str, str], dict[str, Tensor]]:
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > min(size - 8, _LARGEST_HEADER):
        raise SRError(f"{path}: damaged, or not a safetensors file (its header claims {header} bytes of {size})")
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {}), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError) as e:
        raise _damaged(path, "safetensors", e) from e


def _check_zip(path: Path) -> None:
    """Nothing is compressed, claims more than there is, or differs from its checksum; PyTorch checks none of it."""
    if not zipfile.is_zipfile(path):
        raise SRError(f"{path}: damaged, or not a PyTorch file (cut short, or something was appended to it)")
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        names = [entry.filename for entry in entries]
        plain = all(e.compress_type == zipfile.ZIP_STORED and e.compress_size == e.file_size for e in entries)
        if not plain or archive.comment or sum(e.file_size for e in entries) > path.stat().st_size:
            raise SRError(
                f"{path}: refused, since it is compressed or claims more than it holds, unlike PyTorch's files"
            )
        if not _ends_once(path):
            raise SRError(f"{path}: refused, since it can be read in two ways: its entries are not where its end says")
        if len(set(names)) < len(names):
            raise SRError(f"{path}: refused, since it holds several entries of one name")
        if any(name.endswith("/constants.pkl") for name in names):
            raise SRError(f"{path}: refused, since it is a TorchScript program; save its state_dict instead")
        pickles = [entry for entry in entries if entry.filename.endswith("data.pkl")]
        if len(pickles) != 1:
            raise SRError(f"{path}: damaged, or not a PyTorch file (it is an archive of something else)")
        if (bad := archive.testzip()) is not None:
            raise SRError(f"{path}: damaged ({bad} differs from its checksum); get the file again")
        _check_pickles(BytesIO(archive.read(pickles[0])), path, 1)


def _ends_once(path: Path) -> bool:
    """Whether the table of an archive's entries ends where its end records begin.

    Python looks for it there, PyTorch where these records say: of two tables, each would read another.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 98))
        records = file.read()
    if records[-22:-18] != b"PK\5\6":
        return False
    if records[-42:-38] != b"PK\6\7":
        length, start = struct.unpack("<II", records[-10:-2])
        return start + length == size - 22
    (wide,) = struct.unpack("<Q", records[-34:-26])  # where the record of 64-bit numbers is, which PyTorch writes
    length, start = struct.unpack("<QQ", records[40:56])
    return records[:4] == b"PK\6\6" and start + length == wide == size - 98


def _check_legacy(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        legacy = content[: len(_LEGACY)] == _LEGACY
        _check_pickles(content, path, _LEGACY_PICKLES if legacy else 1)
        if not legacy:
            raise SRError(f"{path}: damaged, or not a PyTorch file (it is no archive and begins like none)")


def _check_pickles(stream: Any, path: Path, count: int) -> None:
    """Refuse pickles that ask for more than tensors and containers, by the names of what they ask for."""
    wanted: set[str] = set()
    trouble: Exception | None = None
    left = _MOST_OPERATIONS
    try:
        for _ in range(count):
            left = _scan(stream, wanted, left)
    except Exception as e:  # a damaged pickle trips over anything
        trouble = e
    forbidden = sorted(name for name in wanted if not _PLAIN.fullmatch(name))
    if forbidden:
        raise SRError(f"{path}: refused, since reading it would run code from the file: it asks for {_list(forbidden)}")
    if trouble is not None:
        raise _damaged(path, "PyTorch", trouble)


def _scan(stream: Any, wanted: set[str], left: int) -> int:
    """Note the global names that one pickle asks for; returns how many more operations may follow."""
    words: list[str] = ["", ""]
    memo: dict[Any, str] = {}
    for code, value, _ in pickletools.genops(stream):
        left -= 1
        if left < 0:
            raise ValueError(f"more than {_MOST_OPERATIONS} operations to read a few tensors")
        name = code.name
        if name in ("GLOBAL", "INST"):
            wanted.add(str(value).replace(" ", ".", 1))
        elif name == "STACK_GLOBAL":
            wanted.add(".".join(words[-2:]))
        elif name.startswith("EXT"):
            wanted.add(f"extension {value}")
        elif isinstance(value, str):
            words = [words[-1], value]
        elif name == "MEMOIZE" or name.endswith("PUT"):
            memo[len(memo) if value is None else value] = words[-1]
        elif name.endswith("GET"):
            words = [words[-1], memo.get(value, "")]
    return left


def _take_apart(content: Mapping[str, Any], file: WeightFile) -> None:
    """A checkpoint of :mod:`sr.module`: the averaged network and the trained one."""
    file.format = "training checkpoint of this project"
    state = content.get("state_dict")
    tensors = _tensors(state) if isinstance(state, Mapping) else {}
    for part in ("ema.", "network."):
        own = {key[len(part) :]: value for key, value in tensors.items() if key.startswith(part)}
        file.sets.append(WeightSet(("state_dict", part), part == "ema.", own))


def _tensors(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, Tensor)}


def _unwrap(
    content: Mapping[Any, Any], where: tuple[str, ...], averaged: bool, seen: set[int]
) -> Iterator[tuple[tuple[str, ...], bool, dict[str, Tensor]]]:
    """Every dictionary of tensors inside known wrappers, however they are nested."""
    if id(content) in seen or len(where) > _DEEPEST:
        return
    seen.add(id(content))
    for key in _WRAPPERS:
        inner = content.get(key)
        if isinstance(inner, Mapping):
            means = key in _AVERAGED or (key == "state_dict" and "current_model_state" in content)
            yield from _unwrap(inner, (*where, key), averaged or means, seen)
    if tensors := _tensors(content):
        yield where, averaged, tensors


def _spread(tensors: dict[str, Tensor], where: tuple[str, ...], averaged: bool) -> Iterator[WeightSet]:
    """The tensors under their bare names; then without the prefix of all, or those of each prefix of some."""
    if _AVERAGES_ONLY in tensors:
        averaged = True
        tensors = {key: value for key, value in tensors.items() if key != _AVERAGES_ONLY}
    if any("_orig_mod." in key for key in tensors):
        where = (*where, "_orig_mod.")
    tensors = {_INSERTED.sub("", key): value for key, value in tensors.items()}
    while tensors and all(key.startswith(_PREFIX) for key in tensors):
        tensors = {key[len(_PREFIX) :]: value for key, value in tensors.items()}
        where = (*where, _PREFIX)
    if not tensors or len(where) > 2 * _DEEPEST:
        return
    yield WeightSet(where, averaged, tensors)
    for prefix in _GROUPS:
        part = {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
        if part:
            yield from _spread(part, (*where, prefix), averaged or prefix[:-1] in _AVERAGED)


def _check_claims(tensors: Mapping[str, Tensor], path: Path, size: int) -> None:
    """Refuse tensors of other kinds, and those whose shapes speak of more than the file holds."""
    total = 0
    for name, value in tensors.items():
        if value.layout != torch.strided or value.is_quantized or value.is_complex() or value.device.type != "cpu":
            kind = "quantised" if value.is_quantized else str(value.layout).removeprefix("torch.")
            kind = "complex" if value.is_complex() else kind if value.device.type == "cpu" else value.device.type
            raise SRError(f"{path}: {name!r} is a {kind} tensor; weights are plain ones")
        total += value.numel() * value.element_size()
        if total > _SLACK * size or (value.numel() == 0 and max(value.shape) > _LARGEST_EMPTY):
            shape = tuple(value.shape)
            raise SRError(f"{path}: refused, since the tensors up to {name!r} {shape} claim more than the file holds")
