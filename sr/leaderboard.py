"""Networks trained on the same terms, side by side: what each scores, and how long it takes.

Each listed network is trained by the same config with each seed, in a process of its own; its averaged weights at the
end of the run are scored (no step is chosen by the pictures that are scored), and all networks are timed in turn. What
is finished is not done again: trained runs and their scores stay in the output folder, an interrupted run goes on from
its last checkpoint. Only the timing, which needs all networks in one process, is always done anew.

The output folder holds ``NETWORK/seedN/``, with the config of the run (``train.yaml``), the run's own folder and its
scores (``scores.json``); and ``leaderboard.md``, ``leaderboard.json`` and ``leaderboard.png``. The runs' own folders
may be removed: configs and scores are enough to add networks (not sets) to a published leaderboard.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

import sr
from sr.atomic import write_text
from sr.checkpoint import load, resume_step
from sr.data import PictureSet, find_pictures
from sr.efficiency import HD, Run, cards, ntire_caption, to_markdown
from sr.errors import SRError
from sr.evaluation import BICUBIC, NetworkModel, SetScores, cell, evaluate
from sr.evaluation.report import markdown_table
from sr.inference import Upscaler
from sr.metrics import PROTOCOLS
from sr.network import SRNetwork
from sr.registry import did_you_mean

log = logging.getLogger(__name__)

_PROTOCOL = PROTOCOLS["sisr-y"]

#: Trains with the arguments of ``scripts/train.py``; raises SRError if the training fails.
Train = Callable[[Sequence[str]], None]


@dataclass(frozen=True)
class Settings:
    """What a leaderboard's file says, under the key ``leaderboard``.

    Attributes:
        networks: name -> ``class_path``, ``init_args`` without the scale, and ``seeds`` where they are not the common.
        train: a training config without ``model.network`` and the seed.
        data: folders to score on, as ``scripts/evaluate.py`` takes them; the last one ranks the networks.
        scale: of all networks.
        seeds: each network is trained once with each.
        size: width and height of the output for which networks are counted and timed.
        timing: fields of :class:`sr.efficiency.Run`; its device also computes the scores.
    """

    networks: dict[str, dict[str, Any]]
    train: dict[str, Any]
    data: list[str]
    scale: int = 4
    seeds: list[int] = field(default_factory=lambda: [0])
    size: tuple[int, int] = HD
    timing: dict[str, Any] = field(default_factory=dict)


def read_settings(path: str | Path) -> Settings:
    """Read a leaderboard's file.

    Raises:
        SRError: it is missing, is no such file, or says something that cannot be.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise SRError(f"cannot read {path} ({e.strerror})") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise SRError(f"{path} is not YAML: {' '.join(str(e).split())}") from e
    given = content.get("leaderboard") if isinstance(content, dict) else None
    if not isinstance(given, dict):
        raise SRError(f"{path} has no section 'leaderboard'; configs/leaderboard_cpu.yaml shows what belongs into it")
    _check_keys(f"{path}: leaderboard", given, Settings, ("networks", "train", "data"))
    for key, kind in {"networks": dict, "train": dict, "data": list, "seeds": list, "timing": dict}.items():
        if key in given and (not isinstance(given[key], kind) or (key != "timing" and not given[key])):
            raise SRError(f"{path}: leaderboard.{key} is a {kind.__name__} that is not empty, not {given[key]!r}")
    for name, entry in given["networks"].items():
        if not isinstance(entry, dict) or not isinstance(entry.get("class_path"), str):
            raise SRError(f"{path}: the network {name} needs a class_path, e.g. sr.archs.sparsesr_t")
        wrong = sorted(entry.keys() - {"class_path", "init_args", "seeds"})
        if wrong or "/" in name:
            what = f"knows class_path, init_args and seeds, not {wrong[0]!r}" if wrong else "names a folder; use no '/'"
            raise SRError(f"{path}: the network {name} {what}")
    _check_keys(f"{path}: leaderboard.timing", given.get("timing", {}), Run)
    return Settings(**given | {"size": tuple(given.get("size", HD))})


def _check_keys(where: str, given: Mapping[str, Any], kind: type, needed: Sequence[str] = ()) -> None:
    known = [f.name for f in dataclasses.fields(kind)]
    for key in given:
        if key not in known:
            raise SRError(f"{where} has no {key!r}{did_you_mean(str(key), known)}; known: {', '.join(known)}")
    for key in needed:
        if key not in given:
            raise SRError(f"{where} lacks {key!r}")


@dataclass(frozen=True)
class Board:
    """What came out.

    Attributes:
        settings: what was asked for.
        seeds: network -> the seeds whose runs are finished; networks without any are left out.
        scores: network, or ``bicubic`` -> set -> one ``{"psnr", "ssim"}`` for each seed (bicubic: one).
        cards: network -> its efficiency card, of :func:`sr.efficiency.cards`.
        failed: run -> what was wrong.
    """

    settings: Settings
    seeds: dict[str, list[int]]
    scores: dict[str, dict[str, list[dict[str, float]]]]
    cards: dict[str, dict[str, Any]]
    failed: dict[str, str]

    def psnr(self, name: str) -> float:
        """Mean over the seeds, on the last set, in dB."""
        return _mean(self.scores[name][self.ranking], "psnr")

    @property
    def ranking(self) -> str:
        """The set that ranks the networks."""
        return list(self.scores[BICUBIC])[-1]

    def points(self) -> dict[str, tuple[float, float]]:
        """Network -> median latency in ms, and :meth:`psnr`."""
        return {name: (card["latency"]["median_ms"], self.psnr(name)) for name, card in self.cards.items()}

    def markdown(self) -> str:
        """The table, by PSNR on the ranking set, and the efficiency cards."""
        sets = list(self.scores[BICUBIC])
        front = pareto_front(self.points())
        rows = [[BICUBIC, "", "", "", "", *(self._cell(BICUBIC, s) for s in sets)]]
        for name in sorted(self.cards, key=self.psnr, reverse=True):
            card = self.cards[name]
            row = [f"{name} *" if name in front else name, str(len(self.seeds[name]))]
            row += [f"{card['parameters'] / 1000:.0f} K", f"{card['latency']['median_ms']:.1f} ms"]
            rows.append([*row, f"{card['ntire']['score']:.4g}", *(self._cell(name, s) for s in sets)])
        header = ["network", "seeds", "parameters", "latency", "NTIRE score", *(f"{s} PSNR/SSIM" for s in sets)]
        steps = self.settings.train["trainer"]["max_steps"]
        scale = self.settings.scale
        return "\n".join(
            [
                f"# Leaderboard, x{scale}, {steps} steps each",
                "",
                markdown_table(header, rows),
                f"- PSNR/SSIM by {_PROTOCOL.name}: {_PROTOCOL.describe(scale)}; mean over the seeds, ± half of their "
                "range.",
                f"- \\* no other network is both faster and better (PSNR on {self.ranking}).",
                f"- {ntire_caption(next(iter(self.cards)))}",
                *(f"- Left out: {run}: {reason}" for run, reason in self.failed.items()),
                "",
                "## What they cost",
                "",
                to_markdown(self.cards),
                "",
            ]
        )

    def _cell(self, name: str, set_name: str) -> str:
        runs = self.scores[name][set_name]
        values = [run["psnr"] for run in runs]
        spread = f" ± {(max(values) - min(values)) / 2:.3f}" if len(values) > 1 else ""
        return cell(_mean(runs, "psnr"), _mean(runs, "ssim")) + spread

    def json(self) -> str:
        """Everything."""
        front = pareto_front(self.points())
        networks = {
            name: {
                "seeds": self.seeds[name],
                "psnr": self.psnr(name),
                "pareto": name in front,
                "scores": self.scores[name],
                "card": card,
            }
            for name, card in self.cards.items()
        }
        content = {"sr": sr.__version__, "torch": torch.__version__, "protocol": dataclasses.asdict(_PROTOCOL)}
        content |= {"settings": dataclasses.asdict(self.settings), "ranking": self.ranking}
        content["bicubic"] = self.scores[BICUBIC]
        return json.dumps(content | {"networks": networks, "failed": self.failed}, indent=1) + "\n"

    def draw(self, path: Path) -> None:
        """PSNR against latency; a bubble's area stands for the parameters, the line is the Pareto front."""
        figure_class = _matplotlib()
        points = self.points()
        figure = figure_class(figsize=(8, 5.5), layout="constrained")
        axes = figure.add_subplot()
        front = pareto_front(points)
        axes.plot(*zip(*(points[name] for name in front), strict=True), color="tab:red", lw=1, zorder=1)
        most = max(card["parameters"] for card in self.cards.values())
        for name, (latency, psnr) in points.items():
            parameters = self.cards[name]["parameters"]
            color = "tab:red" if name in front else "tab:blue"
            axes.scatter(latency, psnr, s=900 * parameters / most, color=color, alpha=0.4, linewidths=0)
            axes.scatter(latency, psnr, s=6, color=color)
            label = f"{name}, {parameters / 1000:.0f} K"
            axes.annotate(label, (latency, psnr), (4, 5), textcoords="offset points", fontsize="x-small")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="x", which="both", labelsize="x-small")
        axes.margins(x=0.2, y=0.1)
        run = next(iter(self.cards.values()))["run"]
        width, height = self.settings.size
        axes.set_xlabel(f"latency for {width} x {height}, ms ({run['device']}, {run['dtype']})")
        axes.set_ylabel(f"PSNR_Y on {self.ranking}, dB")
        axes.set_title(f"x{self.settings.scale}; bubble: parameters; line: Pareto front", fontsize="medium")
        axes.grid(alpha=0.3, which="both")
        figure.savefig(path, dpi=120)


def pareto_front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Names of the points (latency, PSNR) that no other is at least as fast and as good as, fastest first."""
    front, best = [], -math.inf
    for name, (_, psnr) in sorted(points.items(), key=lambda item: (item[1][0], -item[1][1])):
        if psnr > best:
            front.append(name)
            best = psnr
    return front


def run_leaderboard(settings: Settings, output: Path, train: Train) -> Board:
    """Train what is not trained yet, score, time, and write the files.

    Args:
        settings: of :func:`read_settings`.
        output: folder for runs and results; with those of an earlier call in it, that one is continued.
        train: trains one network, where it belongs.

    Returns:
        What was written, if need be without the runs whose training failed.

    Raises:
        SRError: before the first step: a setting that cannot be, or runs of other settings in ``output``. After the
            last: no run is finished.
    """
    _matplotlib()  # rather now than in the end
    networks = {name: _build(name, entry, settings.scale) for name, entry in settings.networks.items()}
    sets = {root: find_pictures(root, settings.scale) for root in settings.data}
    if len({pictures.name for pictures in sets.values()}) < len(settings.data):
        raise SRError("two data sets have the same name; give folders of different names, each once")
    runs = [_plan(settings, name, seed, output) for name in networks for seed in _seeds(settings, name)]

    scores: dict[str, dict[str, list[dict[str, float]]]] = {}
    seeds: dict[str, list[int]] = {}
    failed: dict[str, str] = {}
    for number, run in enumerate(runs, 1):
        print(f"[{number}/{len(runs)}] {run.name}, seed {run.seed}", flush=True)
        try:
            checkpoint = run.finish(networks[run.name], train) if run.unscored(sets) else None
        except SRError as e:  # the others can still be compared
            failed[f"{run.name}, seed {run.seed}"] = str(e)
            log.warning("%s, seed %d: %s", run.name, run.seed, e)
            continue
        seeds.setdefault(run.name, []).append(run.seed)
        for who, by_set in run.score(checkpoint, sets, settings.timing.get("device")).items():
            for set_name, score in by_set.items():
                known = scores.setdefault(BICUBIC if who == BICUBIC else run.name, {}).setdefault(set_name, [])
                if who != BICUBIC or not known:
                    known.append(score)
    if not seeds:
        raise SRError(f"no run is finished: {next(iter(failed.values()))}")
    measured = cards({name: networks[name] for name in seeds}, size=settings.size, run=Run(**settings.timing))
    board = Board(settings, seeds, scores, measured, failed)
    write_text(output / "leaderboard.md", board.markdown())
    write_text(output / "leaderboard.json", board.json())
    board.draw(output / "leaderboard.png")
    return board


@dataclass(frozen=True)
class _Run:
    """One network with one seed."""

    name: str
    seed: int
    folder: Path
    steps: int

    def finish(self, network: SRNetwork, train: Train) -> Path:
        """Train to the end, if that is not done yet; gives the last checkpoint."""
        checkpoint = self._checkpoint()
        if checkpoint is None and self._known():
            raise SRError(f"its scores are there, but not its weights; remove {self._file} to train it again")
        if checkpoint and resume_step(checkpoint, network) >= self.steps:
            return checkpoint
        arguments = ["--config", str(self.folder / "train.yaml"), "--seed_everything", str(self.seed)]
        arguments += ["--runs", str(self.folder.parent), "--name", self.folder.name]
        train([*arguments, *(["--ckpt_path", str(checkpoint)] if checkpoint else [])])
        checkpoint = self._checkpoint()
        if checkpoint is None or resume_step(checkpoint, network) < self.steps:
            raise SRError("the training ended before its last step")
        return checkpoint

    def unscored(self, sets: Mapping[str, PictureSet]) -> list[str]:
        """Sets that have no scores yet."""
        known = self._known()
        return [root for root in sets if root not in known]

    def score(self, checkpoint: Path | None, sets: Mapping[str, PictureSet], device: str | None) -> dict[str, Any]:
        """``bicubic`` and ``own`` -> set -> PSNR and SSIM; what was scored before is read from a file."""
        known = self._known()
        if checkpoint is not None:
            model = NetworkModel("own", str(checkpoint), Upscaler(load(checkpoint), device=device, dtype=torch.float32))
        for root in self.unscored(sets):
            found = list(evaluate([model], sets[root], [_PROTOCOL]))
            result = SetScores(sets[root].name, sets[root].scale, [BICUBIC, "own"], found)
            means = {who: result.mean(who, _PROTOCOL) for who in result.models}
            known[root] = {who: {"psnr": mean.psnr, "ssim": mean.ssim} for who, mean in means.items()}
            write_text(self._file, json.dumps(known, indent=1) + "\n")
        return {who: {sets[root].name: known[root][who] for root in sets} for who in (BICUBIC, "own")}

    @property
    def _file(self) -> Path:
        return self.folder / "scores.json"

    def _known(self) -> dict[str, Any]:
        return json.loads(self._file.read_text()) if self._file.is_file() else {}

    def _checkpoint(self) -> Path | None:
        found = self.folder.glob("*/checkpoints/last.ckpt")
        return max(found, key=lambda path: int(path.parents[1].name), default=None)


def _plan(settings: Settings, name: str, seed: int, output: Path) -> _Run:
    """Write the run's training config, or find the same one there."""
    entry, model = settings.networks[name], settings.train.get("model")
    steps = settings.train.get("trainer", {}).get("max_steps")
    if not isinstance(model, dict) or "network" in model or not isinstance(steps, int) or steps < 1:
        raise SRError("leaderboard.train needs model (without its network) and trainer.max_steps")
    network = {"class_path": entry["class_path"], "init_args": _arguments(entry, settings.scale)}
    config = settings.train | {"model": {"network": network} | model}
    file = output / name / f"seed{seed}" / "train.yaml"
    if not file.is_file():
        write_text(file, yaml.safe_dump(config, sort_keys=False))
    elif yaml.safe_load(file.read_text(encoding="utf-8")) != config:
        raise SRError(
            f"{file.parent} was trained with other settings, kept in {file.name}; remove the folder, or choose another "
            "--output"
        )
    return _Run(name, seed, file.parent, steps)


def _seeds(settings: Settings, name: str) -> list[int]:
    return settings.networks[name].get("seeds", settings.seeds)


def _arguments(entry: Mapping[str, Any], scale: int) -> dict[str, Any]:
    return {"scale": scale, **entry.get("init_args", {})}


def _build(name: str, entry: Mapping[str, Any], scale: int) -> SRNetwork:
    """The network with random weights: finds mistakes before hours of training."""
    module, _, attribute = entry["class_path"].rpartition(".")
    try:
        network = getattr(importlib.import_module(module), attribute)(**_arguments(entry, scale))
    except (ImportError, AttributeError, ValueError, TypeError) as e:  # an SRError is a ValueError
        raise SRError(f"the network {name} cannot be built: {e}") from e
    if not isinstance(network, SRNetwork) or network.scale != scale:
        raise SRError(f"the network {name} is no SRNetwork of scale {scale}")
    return network


def _mean(runs: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.fmean(run[key] for run in runs)


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise SRError("the leaderboard's plot needs matplotlib: pip install -e '.[plots]'") from e
    return Figure
