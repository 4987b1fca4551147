"""The model card of a weights file: what it is, how to use it, what it costs, how good it is, in Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from sr.archs.external import SpandrelNetwork
from sr.efficiency import to_markdown
from sr.network import SRNetwork
from sr.weights import PretrainedWeights

_UNKNOWN = "not stated"
_SHOWN_PROTOCOL = "sisr-y"  # of what is measured while training, and of the records of published weights


def model_card(
    source: str,
    network: SRNetwork,
    efficiency: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    record: PretrainedWeights | None = None,
) -> str:
    """Write a model card.

    Args:
        source: what :func:`sr.load` takes for these weights; the usage shows it.
        network: the network that it gives.
        efficiency: what :func:`sr.efficiency.card` counted and measured.
        metadata: what :func:`sr.checkpoint.read_info` gives. Of its ``info`` the card shows ``recipe``, ``step``,
            ``data``, ``metrics`` (protocol -> set -> ``psnr_y``, ``ssim_y``), ``validation`` and ``bicubic`` (set ->
            the same two) and ``licence``.
        record: of weights that are known by name; it fills in what the file does not say.

    Returns:
        Markdown; what nobody has said is "not stated".
    """
    metadata = dict(metadata or {})
    info = metadata.get("info")
    info = info if isinstance(info, dict) else {}
    said = {key: info.get(key) or (getattr(record, key) if record else None) for key in ("recipe", "data", "licence")}
    recipe = said["recipe"]
    config = [f"```yaml\n{recipe.strip()}\n```"] if isinstance(recipe, str) and "\n" in recipe.strip() else []
    arch = f"{network.hparams['arch']} (through spandrel)" if isinstance(network, SpandrelNetwork) else network.arch
    sections = [
        f"# {record.name if record else source}",
        f"A network that enlarges RGB pictures {network.scale} times, of the architecture {arch}.",
        "## Usage",
        f"```bash\npython scripts/upscale.py image.png -m {source} -o large.png\n```",
        "```python\nimport sr\nfrom PIL import Image\n\n"
        f'upscaler = sr.Upscaler(sr.load("{source}"))\nupscaler(Image.open("image.png")).save("large.png")\n```',
        "## What it is",
        _facts(network, arch, metadata, _text(said["licence"])),
        "## What it costs",
        "Parameters, multiplications and activations are counted for an output of 1280 x 720, as papers do.",
        to_markdown({record.name if record else network.arch: efficiency}),
        "## Training",
        _table({"recipe": "see below" if config else recipe, "steps": info.get("step"), "data": said["data"]}),
        *config,
        "## How good it is",
        _scores(info, record),
        "## Limits",
        "\n".join(f"* {limit}" for limit in _limits(network, said["data"])),
    ]
    return "\n\n".join(sections) + "\n"


def _facts(network: SRNetwork, arch: str, metadata: Mapping[str, Any], licence: str) -> str:
    given = {key: value for key, value in network.hparams.items() if key not in ("scale", "arch")}
    return _table(
        {
            "architecture": arch,
            "arguments": ", ".join(f"`{key}={json.dumps(value)}`" for key, value in given.items()) or "none",
            "scale": f"x{network.scale}",
            "input, output": f"{network.in_channels} channels (RGB) in [0, 1], any size; the output is not clamped",
            "licence of the weights": licence,
            "written by version": metadata.get("version"),
        }
    )


def _table(rows: Mapping[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {_text(value)} |" for key, value in rows.items())])


def _text(value: Any) -> str:
    """One line that a cell of a table can hold."""
    if value is None or value in ("", {}, []):
        return _UNKNOWN
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split()).replace("|", "\\|")


def _scores(info: Mapping[str, Any], record: PretrainedWeights | None) -> str:
    """A table for each protocol, beside bicubic's where those are known."""
    bicubic = _dictionary(info.get("bicubic"))
    tables = {str(name): _dictionary(sets) for name, sets in _dictionary(info.get("metrics")).items()}
    if record and record.metrics and not tables:
        tables[_SHOWN_PROTOCOL] = {name: {"psnr_y": a, "ssim_y": b} for name, (a, b) in record.metrics.items()}
    parts = [_score_table(f"By protocol `{name}`:", sets, bicubic) for name, sets in tables.items() if sets]
    if validation := _dictionary(info.get("validation")):
        parts.append(_score_table("On luma, in the validation of its training (which chose it):", validation, bicubic))
    return "\n\n".join(parts) or f"Scores: {_UNKNOWN}; `python scripts/evaluate.py` measures them."


def _score_table(title: str, sets: Mapping[str, Any], bicubic: Mapping[str, Any]) -> str:
    lines = [title, "", "| data set | PSNR / SSIM | bicubic |", "|---|---|---|"]
    for name, scores in sets.items():
        own, base = _dictionary(scores), _dictionary(bicubic.get(name))
        lines.append(f"| {_text(str(name))} | {_pair(own)} | {_pair(base)} |")
    return "\n".join(lines)


def _pair(scores: Mapping[str, Any]) -> str:
    psnr, ssim = (next((scores[key] for key in (f"{m}_y", m) if key in scores), None) for m in ("psnr", "ssim"))
    if not isinstance(psnr, int | float) or not math.isfinite(psnr):
        return _UNKNOWN
    return f"{psnr:.2f} dB" + (f" / {ssim:.4f}" if isinstance(ssim, int | float) else "")


def _limits(network: SRNetwork, data: Any) -> list[str]:
    field = network.receptive_field
    yet = "" if data else " What these weights were trained on is not stated."
    return [
        "It fits pictures like those that it was trained on; others (compressed, noisy, blurred in another way) may "
        f"come out worse than by bicubic enlargement.{yet}",
        "Detail that it adds is likely, not true: faces, text and measurements must not be read off it.",
        "Every output pixel depends on the whole picture, so that tiles change the result a little."
        if field is None
        else f"An output pixel depends on input pixels up to {field} away; tiles with that margin change nothing.",
    ]


def _dictionary(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
