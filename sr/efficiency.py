"""The efficiency card of a network: what it costs, counted and measured.

Counted, at the input that gives an output of 1280 x 720, as papers do, and after :meth:`SRNetwork.fuse`:

* parameters;
* MACs, multiplications that are added up, and FLOPs, two for each MAC: of convolutions, linear layers, matrix products
  and attention. Padding to ``multiple_of`` is included. Not counted are biases, element-wise operations, norms,
  pooling, resizing and Fourier transforms;
* activations: output elements of all convolutions, and the number of these, as in "NTIRE 2022 Challenge on Efficient
  Super-Resolution: Methods and Results", Y. Li et al., CVPRW 2022.

All of this is by definition: a fused or clever kernel counts as the plain operations it replaces. A network whose
kernels a counter cannot look into says what it costs, in a method ``work(h, w)`` that returns ``macs``, ``activations``
and ``convolutions`` for an input of h x w pixels.

Measured are latency and the memory that a run takes; they hold for the machine and the settings that stand beside them.

Networks that are measured together also get the efficiency score of the NTIRE challenges (:func:`ntire_score`). Its
baseline is the first of them, not the challenges' own (RLFN, EFDN) on their GPU, so scores hold within one run only.
"""

from __future__ import annotations

import copy
import logging
import math
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sr.archs import stencils
from sr.errors import SRError
from sr.network import SRNetwork
from sr.onnx_network import OnnxNetwork
from sr.profiling import Job, extra_memory, timings

log = logging.getLogger(__name__)

HD = (1280, 720)  # width and height of the output for which papers count
DTYPES = ("float32", "bfloat16", "float16")

_NTIRE_WEIGHTS = (0.7, 0.15, 0.15)  # of latency, FLOPs, parameters
_LARGEST_EXPONENT = 700.0  # e^710 is more than a double holds


@dataclass(frozen=True)
class Run:
    """How networks are run to be measured.

    Attributes:
        device: ``cpu``, ``cuda`` ...
        dtype: one of ``DTYPES``; the narrow ones by autocast.
        channels_last: memory format of weights and input.
        compile: whether ``torch.compile`` is applied; without it, nothing is compiled.
        repeats: how often each network is timed, after one run that is not.
    """

    device: str = "cpu"
    dtype: str = "float32"
    channels_last: bool = True
    compile: bool = False
    repeats: int = 7


def card(
    network: SRNetwork, *, size: tuple[int, int] = HD, run: Run | None = None, measure_time: bool = True
) -> dict[str, Any]:
    """The efficiency card of one network, for ``sr.save(..., info={"efficiency": card(network)})`` for instance.

    Args:
        network: any network; it stays as it is, and no global random number is drawn.
        size: width and height of the output; the input is the nearest size to ``size / network.scale``.
        run: how to run the network to measure it.
        measure_time: also run it, for ``latency`` and ``extra_memory_mib``. Counting takes a second or so.

    Returns:
        A dictionary that JSON can hold; see :func:`cards`. Without ``ntire``, which compares several.

    Raises:
        SRError: a size or a setting that cannot be.
    """
    own = cards({"": network}, size=size, run=run, measure_time=measure_time)[""]
    own.pop("ntire", None)
    return own


def cards(
    networks: Mapping[str, SRNetwork],
    *,
    size: tuple[int, int] = HD,
    run: Run | None = None,
    measure_time: bool = True,
) -> dict[str, dict[str, Any]]:
    """The cards of several networks, which are timed in turn, A B C A B C. Arguments as in :func:`card`.

    Returns:
        For each network ``scale``, ``input`` and ``output`` (width, height), ``parameters``, ``macs``, ``flops``,
        ``activations``, ``convolutions``; if measured, also ``latency`` (``median_ms``, ``quartiles_ms``: the first and
        the third), ``extra_memory_mib`` (by how much one run raises the peak; ``None`` where it cannot be measured),
        ``run`` (the settings, with ``device_name``, ``threads`` and ``torch``) and ``ntire`` (``score``, lower is
        better, see :func:`ntire_score`, and ``baseline``, the name of the first network).
    """
    run = run or Run()
    if min(size) < 1:
        raise SRError(f"an output of {size[0]}x{size[1]} pixels cannot be; give a width and a height of at least 1")
    inputs = {name: _input_size(size, network.scale) for name, network in networks.items()}
    result: dict[str, dict[str, Any]] = {}
    for name, network in networks.items():
        height, width = inputs[name]
        output = [width * network.scale, height * network.scale]
        result[name] = {"scale": network.scale, "input": [width, height], "output": output}
        result[name] |= count(network, height, width)
    if measure_time:
        for name, measured in _measure(networks, inputs, run).items():
            result[name] |= measured
        baseline = next(iter(result), "")
        for own in result.values():
            own["ntire"] = {"score": ntire_score(own, result[baseline]), "baseline": baseline}
    return result


def ntire_score(own: Mapping[str, Any], baseline: Mapping[str, Any]) -> float:
    """The efficiency score of the NTIRE 2025 challenge, lower is better; a network that equals the baseline has e^2.

    0.7 e^(2 t/t0) + 0.15 e^(2 F/F0) + 0.15 e^(2 P/P0), with the median latency t, the FLOPs F and the parameters P of
    both: "The Tenth NTIRE 2025 Efficient Super-Resolution Challenge Report", B. Ren et al., CVPRW 2025
    (arXiv 2504.10686). There t0, F0 and P0 are those of EFDN, and times are taken on the organisers' GPU.

    Args:
        own: the card of a network.
        baseline: the card that has t0, F0 and P0.

    Returns:
        The score; exponents end at 700, so that it is finite.
    """
    pairs = [(card["latency"]["median_ms"], card["flops"], card["parameters"]) for card in (own, baseline)]
    terms = zip(_NTIRE_WEIGHTS, *pairs, strict=True)
    return sum(weight * math.exp(min(2 * _ratio(a, b), _LARGEST_EXPONENT)) for weight, a, b in terms)


def _ratio(own: float, baseline: float) -> float:
    if baseline:
        return own / baseline
    return math.inf if own else 1.0


def _input_size(size: tuple[int, int], scale: int) -> tuple[int, int]:
    """Height and width of the input; 427 x 240 for 1280 x 720 at x3, as in published tables."""
    width, height = (max(1, round(edge / scale)) for edge in size)
    return height, width


# --- counting --------------------------------------------------------------------------------------------------------


def count(network: SRNetwork, height: int, width: int) -> dict[str, int]:
    """``parameters``, ``macs``, ``flops``, ``activations`` and ``convolutions`` for one input of height x width."""
    network = _deployed(network)
    own = getattr(network, "work", None)
    work: dict[str, int] = own(height, width) if own is not None else _observe(network, height, width)
    parameters = sum(p.numel() for p in network.parameters())
    return {"parameters": parameters, "macs": work["macs"], "flops": 2 * work["macs"]} | {
        key: work[key] for key in ("activations", "convolutions")
    }


def _deployed(network: SRNetwork) -> SRNetwork:
    return copy.deepcopy(network).eval().requires_grad_(False).fuse()


def _observe(network: SRNetwork, height: int, width: int) -> dict[str, int]:
    """What goes through PyTorch's dispatcher in one forward pass, if possible of shapes alone."""
    outputs: list[int] = []

    def convolution(
        x: torch.Size, weight: torch.Size, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
        *rest: Any, out_shape: torch.Size, **kwargs: Any,
    ) -> int:  # fmt: skip
        outputs.append(math.prod(out_shape))
        return 2 * math.prod(weight[1:]) * math.prod(x if transposed else out_shape)

    formulas = _FORMULAS | {torch.ops.aten.convolution: convolution}

    def macs(network: SRNetwork, device: str) -> int:
        outputs.clear()
        lq = _noise(network, height, width).to(device)
        with torch.no_grad(), _eager(), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            network.to(device)(lq)
        return counter.get_total_flops() // 2

    try:
        total = macs(copy.deepcopy(network), "meta")
    except (RuntimeError, TypeError):  # something in it asks for values, or is not made for this device
        total = macs(network, "cpu")
    return {"macs": total, "activations": sum(outputs), "convolutions": len(outputs)}


def _attention(q: torch.Size, k: torch.Size, v: torch.Size, *args: Any, **kwargs: Any) -> int:
    """q (..., L, E), k (..., S, E), v (..., S, Ev): products with all keys, also where a mask hides them."""
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _with_vector(a: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(a)


# What torch.utils.flop_counter has no formula for: fused attention on a CPU, and products with a vector.
_FORMULAS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable: _attention,
    torch.ops.aten.mv: _with_vector,
    torch.ops.aten.dot: _with_vector,
}


def _noise(network: SRNetwork, height: int, width: int) -> Tensor:
    """A picture in which nothing can be skipped, without touching the global random numbers."""
    return torch.rand(1, network.in_channels, height, width, generator=torch.Generator().manual_seed(0))


@contextmanager
def _eager() -> Iterator[None]:
    """Kernels that start to compile once there is much to do stay as they are, or runs would differ."""
    before, stencils.compile_kernels = stencils.compile_kernels, False
    try:
        yield
    finally:
        stencils.compile_kernels = before


# --- measuring -------------------------------------------------------------------------------------------------------


def _measure(
    networks: Mapping[str, SRNetwork], inputs: Mapping[str, tuple[int, int]], run: Run
) -> dict[str, dict[str, Any]]:
    if run.repeats < 2:
        raise SRError(f"quartiles need at least 2 repeats, not {run.repeats}")
    if run.dtype not in DTYPES:
        raise SRError(f"networks run in {', '.join(DTYPES)}, not {run.dtype}")
    try:
        device = torch.device(run.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as e:
        raise SRError(f"there is no device {run.device!r} here; try cpu or cuda") from e
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device.type
    settings = asdict(run) | {"device_name": name, "threads": torch.get_num_threads(), "torch": torch.__version__}

    if onnx := [name for name, network in networks.items() if isinstance(network, OnnxNetwork)]:
        raise SRError(f"{onnx[0]} is an ONNX file, in which nothing can be counted")
    networks = {name: _deployed(network) for name, network in networks.items()}
    jobs = {name: make_job(network, *inputs[name], run) for name, network in networks.items()}
    result: dict[str, dict[str, Any]] = {}
    for name, seconds in timings(jobs, run.repeats).items():
        first, median, third = statistics.quantiles([1000 * s for s in seconds], n=4, method="inclusive")
        result[name] = {
            "latency": {"median_ms": round(median, 3), "quartiles_ms": [round(first, 3), round(third, 3)]},
            "extra_memory_mib": None,
            "run": settings,
        }
    for name, network in networks.items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            jobs[name]()
            memory = (torch.cuda.max_memory_allocated(device) - before) / 2**20
        elif device.type == "cpu" and sys.platform == "linux":
            try:
                memory = extra_memory(make_job, network, *inputs[name], run)
            except RuntimeError as e:  # where the system does not let a process look at itself
                log.warning("the memory of %s is not known: %s", name, e)
                continue
        else:
            continue
        result[name]["extra_memory_mib"] = round(memory, 1)
    return result


def make_job(network: SRNetwork, height: int, width: int, run: Run) -> Job:
    """One forward pass of ``network``, which is moved to the device, on a picture of height x width pixels."""
    device, dtype = torch.device(run.device), getattr(torch, run.dtype)
    layout = torch.channels_last if run.channels_last else torch.contiguous_format
    network = network.to(device).to(memory_format=layout)
    lq = _noise(network, height, width).to(device).contiguous(memory_format=layout)
    forward = torch.compile(network) if run.compile else network

    def job() -> None:
        narrow = torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
        with torch.inference_mode(), _eager(), narrow:
            forward(lq)
        if device.type != "cpu":
            torch.accelerator.synchronize()

    return job


# --- showing ---------------------------------------------------------------------------------------------------------


def to_markdown(result: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table of :func:`cards`, with the settings above it."""
    rows = ["network", "scale", "input", "parameters", "MACs", "FLOPs", "activations", "convolutions"]
    measured = all("run" in c for c in result.values())
    lines = []
    if measured:
        run = next(iter(result.values()))["run"]
        memory_format = "channels-last" if run["channels_last"] else "contiguous"
        where = f"{run['device']} ({run['device_name']}), threads: {run['threads']}, torch {run['torch']}"
        how = f"{run['dtype']}, {memory_format}, {'torch.compile' if run['compile'] else 'eager'}"
        lines += [f"{where}; {how}; median (quartiles) of {run['repeats']} runs in turn.", ""]
        rows += ["latency", "extra memory"]
    baselines = {c["ntire"]["baseline"] for c in result.values() if "ntire" in c}
    scored = len(baselines) == 1 and all("ntire" in c for c in result.values())  # else they are of several runs
    if scored:
        lines[-1:] = [*ntire_caption(baselines.pop()).splitlines(), ""]
        rows += ["NTIRE score"]
    lines += [f"| {' | '.join(rows)} |", "|---" * len(rows) + "|"]
    for name, c in result.items():
        cells = [f"`{name}`", f"x{c['scale']}", "{}x{}".format(*c["input"])]
        cells += [_short(c[key]) for key in ("parameters", "macs", "flops", "activations")] + [str(c["convolutions"])]
        if measured:
            time, memory = c["latency"], c["extra_memory_mib"]
            cells += ["{:.1f} ms ({:.1f}-{:.1f})".format(time["median_ms"], *time["quartiles_ms"])]
            cells += ["not measured" if memory is None else f"{memory:.0f} MiB"]
        if scored:
            cells += [f"{c['ntire']['score']:.4g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ntire_caption(baseline: str) -> str:
    """What a reader of the scores must know."""
    return (
        f"NTIRE score, lower is better: 0.7 e^(2 t/t0) + 0.15 e^(2 F/F0) + 0.15 e^(2 P/P0) of latency, FLOPs and "
        f"parameters relative to\n`{baseline}`, which has e^2 = 7.389 (formula: NTIRE 2025 Efficient SR report, arXiv "
        f"2504.10686; its baseline, EFDN, is not used)."
    )


def _short(number: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return str(number)
