"""ONNX files as networks, for inference only: they are run by onnxruntime, which does without PyTorch."""

from __future__ import annotations

import importlib
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sr.errors import SRError
from sr.network import SRNetwork

_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_PROBE = (64, 48)  # height and width of the picture that tells the scale
# How an ONNX file names another file with tensors: the key "location", and then a field with the name.
_LOCATION = b"\n\x08location"
_VALUE = 0x12


class OnnxNetwork(SRNetwork):
    """An ONNX file: one input of shape (N, 3, h, w), RGB in [0, 1], float32 or float16, any h and w; one such output.

    Args:
        path: the file.
        device: ``cpu``, or ``cuda`` with onnxruntime-gpu.

    Raises:
        SRError: onnxruntime is missing, or the file is damaged or another kind of network.
    """

    path: str
    session: Any
    entry: str
    dtype: type[np.floating]
    one_by_one: bool

    def __init__(self, *, path: str, device: str = "cpu") -> None:
        _check_external(Path(path))
        session = _open(path, device)
        (entry, *others), outputs = session.get_inputs(), session.get_outputs()
        shape = entry.shape
        if others or len(outputs) != 1 or entry.type not in _TYPES or len(shape) != 4 or shape[1] not in (3, None):
            raise SRError(f"{path}: needs one float32 input (N, 3, h, w) and one output, not {entry.type} {shape}")
        if any(isinstance(edge, int) for edge in shape[2:]):
            raise SRError(f"{path} takes {shape[3]}x{shape[2]} pixels only; export it with dynamic height and width")
        self.__dict__.update(path=path, session=session)  # before Module.__init__, which needs the scale
        self.__dict__.update(entry=entry.name, dtype=_TYPES[entry.type], one_by_one=isinstance(shape[0], int))
        super().__init__(scale=self._find_scale(*_PROBE))

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxNetwork:
        return self  # a session serves any number of threads, and nothing else of it changes

    def upscale(self, lq: Tensor) -> Tensor:
        parts = lq.split(1) if self.one_by_one else (lq,)
        return torch.cat([self._run(part) for part in parts])

    def _find_scale(self, height: int, width: int) -> int:
        out = self._run(torch.zeros(1, 3, height, width))
        scale = out.shape[-1] // width
        if scale < 1 or out.shape != (1, 3, height * scale, width * scale):
            raise SRError(
                f"{self.path} makes {tuple(out.shape)} of {(1, 3, height, width)}; it must enlarge RGB evenly"
            )
        return scale

    def _run(self, lq: Tensor) -> Tensor:
        array: np.ndarray = lq.detach().cpu().contiguous().numpy().astype(self.dtype, copy=False)
        try:
            (out,) = self.session.run(None, {self.entry: array})
        except Exception as e:  # onnxruntime's errors have no common base
            size = f"{lq.shape[-1]}x{lq.shape[-2]}"
            raise SRError(f"{self.path} fails on a picture of {size} ({_first_line(e)})") from e
        return torch.from_numpy(out).to(lq.device, lq.dtype)


def _open(path: str, device: str) -> Any:
    try:
        ort = importlib.import_module("onnxruntime")
    except ModuleNotFoundError as e:
        raise SRError(f"{path} needs onnxruntime: pip install onnxruntime") from e
    providers: list[Any] = ["CPUExecutionProvider"]
    if device.startswith("cuda"):
        if "CUDAExecutionProvider" not in ort.get_available_providers():
            raise SRError(f"{path}: this onnxruntime has no CUDA; install onnxruntime-gpu, or use --device cpu")
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": torch.device(device).index or 0}))
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # errors are raised as well
    try:
        return ort.InferenceSession(path, options, providers=providers)
    except Exception as e:  # onnxruntime's errors have no common base
        raise SRError(f"{path}: damaged, or not an ONNX file ({_first_line(e)})") from e


def _check_external(path: Path) -> None:
    """Refuse a file that names one outside its own folder, which onnxruntime would read."""
    if path.stat().st_size == 0:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = content.find(_LOCATION)
        while at >= 0:
            name = _string(content, at + len(_LOCATION))
            inside = name and (path.parent / name).resolve().is_relative_to(path.parent.resolve())
            if not inside or ".." in name.replace("\\", "/").split("/"):
                raise SRError(f"{path}: refused, since it reads {name!r}, which is not in its folder")
            at = content.find(_LOCATION, at + 1)


def _string(content: mmap.mmap, at: int) -> str:
    """The value that follows the key: a tag, the length in groups of 7 bits, the bytes; empty if it does not."""
    tag, *rest = content[at : at + 6] or b"\0"
    length = count = 0
    for count, byte in enumerate(rest):
        length |= (byte & 127) << (7 * count)
        if byte < 128:
            break
    start = at + 2 + count
    return content[start : start + length].decode("utf-8", "replace") if tag == _VALUE else ""


def _first_line(e: Exception) -> str:
    return str(e).splitlines()[0][:200] if str(e) else repr(e)
