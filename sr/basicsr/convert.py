"""Training configs of BasicSR and of its relatives (neosr, traiNNer), turned into the project's own.

Every setting is taken out of the foreign config when it is used. What is left at the end has no counterpart, and is
listed with the reason: nothing is dropped in silence.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from sr.basicsr.tables import CHANNELS, LOSSES, OPTIMIZERS, OWN, SAME, SCALES, STAND_IN, THEIRS, WHY
from sr.errors import SRError

Node = dict[str, Any]
_NEOSR = ("image", "otf")  # what its configs call their models


def read(path: str | Path) -> Node:
    """Read a YAML or TOML file into plain dictionaries.

    Raises:
        SRError: it is missing, is no such file, or TOML on Python 3.10.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        parse = importlib.import_module("tomllib").loads if path.suffix == ".toml" else yaml.safe_load
        content = parse(text)
    except ModuleNotFoundError as e:
        raise SRError(f"{path}: reading TOML needs Python 3.11 or later") from e
    except (OSError, ValueError, yaml.YAMLError) as e:
        raise SRError(f"{path} cannot be read as a config ({' '.join(str(e).split())[:200]})") from e
    if not isinstance(content, dict) or not isinstance(content.get("network_g"), dict):
        raise SRError(f"{path} is no training config of BasicSR or its relatives: it has no section network_g")
    return content


def convert(foreign: Mapping[str, Any]) -> tuple[Node, list[str]]:
    """Turn a config of BasicSR, neosr or traiNNer into the project's.

    Args:
        foreign: what :func:`read` gives; it stays as it is.

    Returns:
        What ``scripts/train.py --config`` takes, and a line for each setting that has no counterpart.

    Raises:
        SRError: the scale, the pictures to train on, the patch size or the length of the run is missing, or a value is
            not of the kind that it has to be.
    """
    return _Conversion(_copy(foreign)).run()


class _Conversion:
    """Takes settings out of ``self.rest`` until nothing is left that has a counterpart."""

    def __init__(self, rest: Node) -> None:
        self.rest = rest
        self.train = _section(rest, "train")
        self.generator = _section(rest, "network_g")

    def run(self) -> tuple[Node, list[str]]:
        rest, train = self.rest, self.train
        scales = [value for value in (rest.pop("scale", None), *self._pop_scales()) if value is not None]
        if not scales:
            raise SRError("the config does not say the scale; add a line such as scale: 4")
        if len(set(map(str, scales))) > 1:
            raise SRError(f"the config gives several scales: {', '.join(map(str, scales))}; leave one")
        self.scale = _whole(scales[0], "scale")
        for name in CHANNELS:
            if self.generator.get(name, 3) != 3:
                raise SRError(f"network_g.{name} is {self.generator[name]}; networks here take and give RGB")
        total = next((s.pop("total_iter") for s in (train, _section(rest, "logger")) if s.get("total_iter")), None)
        if total is None:
            raise SRError("the config does not say how long to train; add train.total_iter")
        self.steps = _whole(total, "train.total_iter")
        model: Node = {"network": self._network(), "losses": self._losses()}
        adversarial = self._adversarial()
        if adversarial:
            model["adversarial"] = adversarial
        model["optimizer"], rate = self._optimizer(_section(train, "optim_g"))
        model["scheduler"] = self._scheduler(rate)
        if adversarial:
            adversarial["optimizer"], _ = self._optimizer(_section(train, "optim_d"))
        average = next((train.pop(name) for name in ("ema_decay", "ema") if name in train), 0)  # BasicSR's default
        model["ema_decay"] = _number(average, "ema_decay")
        if model["network"]["class_path"] != STAND_IN:
            model |= self._start()
        trainer = self._trainer()
        own: Node = {}
        if (seed := rest.pop("manual_seed", None)) is not None:
            own["seed_everything"] = _whole(seed, "manual_seed")
        if (name := rest.pop("name", None)) is not None:
            own["name"] = str(name)
        own |= {"model": model, "data": self._data(trainer), "trainer": trainer}
        model |= self._crop_border()
        return own, [self._complaint(key, value) for key, value in _leaves(rest) if not _is_same(key, value)]

    @staticmethod
    def _complaint(key: str, value: Any) -> str:
        why = next((text for pattern, text in WHY.items() if _fits(pattern, key)), "nothing is like it")
        return f"no counterpart: {key}: {value} ({why})"

    def _pop_scales(self) -> list[Any]:
        return [self.generator.pop(name) for name in SCALES if name in self.generator]

    # --- the network

    def _network(self) -> Node:
        given = self.generator
        kind = str(given.get("type", "")).lower().replace("_", "")
        if kind in OWN:
            del given["type"]
            path, names = OWN[kind]
            own = {here: given.pop(there) for there, here in names.items() if there in given}
            return {"class_path": path, "init_args": {"scale": self.scale, **own}}
        found = _find_in_spandrel(kind)
        if found is None:
            return {"class_path": STAND_IN, "init_args": {"scale": self.scale}}
        del given["type"]
        arch, parameters, renamed = found
        args: Node = {}
        for there in list(given):
            here = renamed.get(there, there)
            if here in parameters:
                args[here] = given.pop(there)
        for name in ("num_in_ch", "num_out_ch"):
            if name in parameters and parameters[name].default is inspect.Parameter.empty:
                args.setdefault(name, 3)
        if arch == "SPAN" and self.rest.get("model_type") in _NEOSR:  # whose defaults are others
            args = {"norm": False, "img_range": 1.0, "rgb_mean": [0.5, 0.5, 0.5]} | args
        if arch == "ESRGAN" and self.scale in (1, 2):  # it enlarges by 4 what is folded into more channels first
            factor = 4 // self.scale
            args |= {"scale": 4, "shuffle_factor": factor, "in_nc": 3 * factor**2}
        return {
            "class_path": "sr.archs.SpandrelNetwork",
            "init_args": {"scale": self.scale, "arch": arch, "args": args},
        }

    def _start(self) -> Node:
        path = _section(self.rest, "path")
        own: Node = {}
        if path.get("pretrain_network_g") is not None:
            own["weights"] = str(path.pop("pretrain_network_g"))
            if path.get("strict_load_g") is False:
                own["weights_partly"] = not path.pop("strict_load_g")
        return own

    # --- what is minimised

    def _losses(self) -> list[Node]:
        train = self.train
        terms = [term for key, term in train.items() if key.endswith("_opt") and isinstance(term, dict)]
        terms += [term for term in train.get("losses") or [] if isinstance(term, dict)]
        losses = []
        for term in terms:
            name = LOSSES.get(str(term.get("type", "")).lower().replace("_", ""))
            if name is None:
                continue
            del term["type"]
            weight = term.pop("perceptual_weight" if "perceptual_weight" in term else "loss_weight", 1.0)
            own: Node = {"weight": _number(weight, "loss_weight")}
            if name == "CharbonnierLoss":  # theirs is sqrt(d^2 + eps)
                own["eps"] = math.sqrt(_number(term.pop("eps", 1e-12), "eps"))
            losses.append({"class_path": f"sr.losses.{name}", "init_args": own})
        return losses or [{"class_path": "sr.losses.L1Loss"}]

    def _adversarial(self) -> Node | None:
        """The game; a loss of that kind stands under ``gan_opt`` or in the list."""
        listed = [t for t in self.train.get("losses") or [] if isinstance(t, dict)]
        terms = [_section(self.train, "gan_opt"), *listed]
        term = next((t for t in terms if str(t.get("type", "")).lower().replace("_", "") == "ganloss"), None)
        if term is None:
            return None
        del term["type"]
        kind = str(term.get("gan_type", "vanilla")).lower()
        game = {"vanilla": "vanilla", "bce": "vanilla", "hinge": "hinge"}.get(kind)
        if game is not None:
            term.pop("gan_type", None)
        if game == "vanilla" and self.rest.get("model_type") == "ESRGANModel":  # its discriminator compares the two
            game = "relativistic"
        own: Node = {
            "optimizer": {},
            # Of two comparisons theirs takes the mean, ours the sum.
            "weight": _number(term.pop("loss_weight", 1.0), "loss_weight") / (2 if game == "relativistic" else 1),
            "game": game or "vanilla",
        }
        network = _section(self.rest, "network_d")
        if str(network.get("type", "")).lower().replace("_", "") in ("unetdiscriminatorsn", "unet"):
            del network["type"]
            if "num_feat" in network:
                own["discriminator"] = {"features": _whole(network.pop("num_feat"), "network_d.num_feat")}
        return own

    def _optimizer(self, given: Node) -> tuple[Node, float]:
        rate = _number(given.pop("lr", 1e-3), "lr")
        if not rate > 0:
            raise SRError(f"lr is larger than 0, not {rate}")
        kind = OPTIMIZERS.get(str(given.get("type", "")).lower(), "")
        if kind:
            del given["type"]
        own: Node = {"lr": rate}
        for name in ("betas", "weight_decay", "momentum", "eps", "amsgrad", "nesterov"):
            if name in given and (kind or name != "momentum"):
                value = given.pop(name)
                own[name] = [_number(v, name) for v in value] if isinstance(value, list) else value
        return {"class_path": kind or "torch.optim.Adam", "init_args": own}, rate

    def _scheduler(self, rate: float) -> Node:
        given = _section(self.train, "scheduler")
        kind = str(given.get("type", "")).lower().replace("_", "")
        if kind.startswith("multistep"):
            del given["type"]
            marks = [round(_number(mark, "milestones") / self.steps, 6) for mark in given.pop("milestones", [])]
            own: Node = {
                "milestones": [mark for mark in marks if 0 < mark < 1],
                "gamma": _number(given.pop("gamma", 0.1), "gamma"),
            }
            return self._warmed("MultiStep", own)
        if "cosineannealing" not in kind:
            return self._warmed("MultiStep", {"milestones": []})  # a constant rate
        del given["type"]
        for name in ("periods", "T_max"):
            if given.get(name) in (self.steps, [self.steps]):  # others have no counterpart
                del given[name]
        return self._warmed("Cosine", {"final": _number(given.pop("eta_min", 0), "eta_min") / rate})

    def _warmed(self, name: str, own: Node) -> Node:
        steps = _number(self.train.get("warmup_iter") or 0, "train.warmup_iter")
        if name == "Cosine" or steps <= 0:
            self.train.pop("warmup_iter", None)
        if name == "Cosine" and steps > 0:
            own = {"warmup": min(steps / self.steps, 0.99), **own}
        return {"class_path": f"sr.schedules.{name}", "init_args": own}

    # --- the pictures

    def _data(self, trainer: Node) -> Node:
        sets = _section(self.rest, "datasets")
        train = _section(sets, "train")
        roots = train.pop("dataroot_gt", None)
        if not roots:
            raise SRError("the config names no pictures to train on; add datasets.train.dataroot_gt")
        lq = train.pop("dataroot_lq", None)
        size = next((train.pop(name) for name in ("patch_size", "lq_size") if name in train), None)
        if size is not None:
            train.pop("gt_size", None)
            size = _whole(size, "datasets.train.patch_size") * self.scale
        elif (size := train.pop("gt_size", None)) is None:
            raise SRError("the config does not say how large patches are; add datasets.train.gt_size")
        batch = next((train.pop(n) for n in ("batch_size_per_gpu", "batch_size", "samples_per_gpu") if n in train), 16)
        devices = trainer.get("devices")
        own: Node = {
            "train": _pictures(roots, lq),
            "gt_size": _whole(size, "datasets.train.gt_size"),
            "batch_size": _whole(batch, "batch_size_per_gpu") * (devices if isinstance(devices, int) else 1),
        }
        workers = next(
            (train.pop(n) for n in ("num_worker_per_gpu", "num_workers", "workers_per_gpu") if n in train), 0
        )
        own["num_workers"] = _whole(workers, "num_worker_per_gpu")
        accumulate = next((train.pop(n) for n in ("accumulate", "accum_iter") if n in train), 1)
        if _whole(accumulate, "accumulate") > 1:
            trainer["accumulate_grad_batches"] = _whole(accumulate, "accumulate")
        own["val"] = []
        for key, given in sets.items():
            if key != "train" and isinstance(given, dict) and given.get("dataroot_gt"):
                label = str(given.get("name") or key).replace("/", "_").replace("\\", "_")
                own["val"] += _pictures(given.pop("dataroot_gt"), given.pop("dataroot_lq", None), label)
        kinds = f"{self.rest.get('model_type')} {train.get('type')}".lower()
        if lq is None and ("realesr" in kinds or "otf" in kinds):
            own["degradation"] = "configs/degradations/real_esrgan.yaml"
        return own

    # --- the run

    def _trainer(self) -> Node:
        own: Node = {"max_steps": self.steps}
        val, logger = _section(self.rest, "val"), _section(self.rest, "logger")
        if val.get("val_freq") is not None:
            own["val_check_interval"] = _whole(val.pop("val_freq"), "val.val_freq")
        if logger.get("print_freq") is not None:
            own["log_every_n_steps"] = _whole(logger.pop("print_freq"), "logger.print_freq")
        devices = self.rest.pop("num_gpu", None)
        if devices == 0:
            own["accelerator"] = "cpu"
        elif isinstance(devices, int):
            own["devices"] = devices
            if devices > 1:
                own["strategy"] = "ddp"
        if self.rest.pop("use_amp", False):
            flags = [self.rest.pop(name, False) for name in ("bfloat16", "amp_bf16")]
            own["precision"] = "bf16-mixed" if any(flags) else "16-mixed"
        return own

    def _crop_border(self) -> Node:
        metrics = _section(_section(self.rest, "val"), "metrics")
        borders = {m["crop_border"] for m in metrics.values() if isinstance(m, dict) and "crop_border" in m}
        if len(borders) != 1:
            return {}
        for metric in metrics.values():
            metric.pop("crop_border", None)
        return {"crop_border": _whole(borders.pop(), "val.metrics.crop_border")}


def _pictures(gt: Any, lq: Any, name: str | None = None) -> list[Node]:
    """The sets of one or several folders; of several, the names are the folders'."""
    gts = gt if isinstance(gt, list) else [gt]
    lqs = lq if isinstance(lq, list) else [lq] * len(gts) if lq is None else [lq]
    if len(gts) != len(lqs):
        raise SRError(f"dataroot_gt names {len(gts)} folders and dataroot_lq {len(lqs)}; they have to be pairs")
    label = {"name": name} if name is not None and len(gts) == 1 else {}
    return [
        {"class_path": "sr.data.GTFolder", "init_args": {"root": str(root), **label}}
        if other is None
        else {"class_path": "sr.data.PairedFolder", "init_args": {"gt": str(root), "lq": str(other), **label}}
        for root, other in zip(gts, lqs, strict=True)
    ]


def _find_in_spandrel(kind: str) -> tuple[str, Mapping[str, inspect.Parameter], Mapping[str, str]] | None:
    """The name for :class:`sr.archs.SpandrelNetwork`, what its class takes, and renamed arguments."""
    from spandrel import architectures  # takes a second

    names = {m.name.lower(): m.name for m in pkgutil.iter_modules(architectures.__path__)}
    arch, renamed = THEIRS.get(kind, (names.get(kind), {}))
    if arch is None:
        return None
    module, _, name = arch.partition(".")
    cls = getattr(importlib.import_module(f"spandrel.architectures.{module}"), name or module, None)
    if not isinstance(cls, type):
        return None
    return arch, inspect.signature(cls).parameters, renamed


def _section(node: Node, key: str) -> Node:
    found = node.get(key)
    return found if isinstance(found, dict) else {}


def _number(value: Any, key: str) -> float:
    """A number, of which YAML makes a text where it is written as 5e5."""
    try:
        return float(value)
    except (TypeError, ValueError) as e:
        raise SRError(f"{key} is a number, not {value!r}") from e


def _whole(value: Any, key: str) -> int:
    number = _number(value, key)
    if not number.is_integer():
        raise SRError(f"{key} is a whole number, not {value!r}")
    return int(number)


def _copy(node: Any) -> Any:
    """Dictionaries and lists of whatever kind as plain ones."""
    if isinstance(node, Mapping):
        return {str(key): _copy(value) for key, value in node.items()}
    return [_copy(value) for value in node] if isinstance(node, list | tuple) else node


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting with its dotted name; those that are null say nothing."""
    if path and _is_same(path, node):
        return
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
    elif isinstance(node, list) and any(isinstance(value, dict) for value in node):
        for i, value in enumerate(node):
            yield from _leaves(value, f"{path}.{i}")
    elif node is not None and node != {}:
        yield path, node


def _is_same(key: str, value: Any) -> bool:
    """Whether a setting asks for what happens here anyway."""
    return any(_fits(pattern, key) and (values is None or value in values) for pattern, values in SAME.items())


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    """``*``: any part of a name between two dots; ``**``: any number of parts."""
    parts = (".*" if part == "**" else "[^.]*" if part == "*" else re.escape(part) for part in re.split(r"(\*+)", text))
    return re.compile("".join(parts))


def _fits(pattern: str, key: str) -> bool:
    return _pattern(pattern).fullmatch(key) is not None
