"""Every recipe of ``configs/`` trains, on tiny pictures and a CPU."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torchvision.models as tv
import yaml

import sr
from sr.archs import assanet
from sr.checkpoint import save
from sr.cli import SRCLI
from sr.errors import SRError

ROOT = Path(__file__).parents[1]
CONFIGS = [p for p in sorted((ROOT / "configs").glob("*.yaml")) if "model" in yaml.safe_load(p.read_text())]
# What makes any recipe run here, and what makes it small; all else runs as it is written.
ON_CPU = (
    *("--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.precision", "32-true"),
    *("--model.compile", "false"),
)
SMALL = (
    *("--trainer.max_steps", "2"),
    *("--data.gt_size", "24", "--data.batch_size", "1", "--data.num_workers", "0"),
)


def roots(node: object) -> list[str]:
    """The folders of pictures that a config names."""
    if isinstance(node, list):
        return [root for child in node for root in roots(child)]
    if isinstance(node, dict):
        own = [node["root"]] if isinstance(node.get("root"), str) else []
        return own + roots(list(node.values()))
    return []


@pytest.fixture
def made_up_data(make_pictures, tmp_path, monkeypatch):
    """A working folder with the project's configs, and tiny pictures wherever one of them looks for any."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SR_RUN_DIR", raising=False)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for path in (tmp_path / "configs").rglob("*.yaml"):
        for root in roots(yaml.safe_load(path.read_text())):
            make_pictures(root, {"a.png": (36, 48)})


@pytest.fixture
def vgg19(monkeypatch):
    """Random weights in place of those that torchvision downloads."""

    def state(self, **_):
        with torch.device("meta"):
            features = tv.vgg19(init_weights=False).features
        return {f"features.{key}": 0.01 * torch.randn(value.shape) for key, value in features.state_dict().items()}

    monkeypatch.setattr(tv.VGG19_Weights, "get_state_dict", state)


@pytest.fixture
def read(made_up_data, vgg19, monkeypatch):
    """What the command line makes of ``configs/<name>`` and further arguments, made to run on a CPU."""
    group = assanet.Group  # eight blocks of the large network in each would take most of these tests' time
    monkeypatch.setattr(assanet, "Group", lambda dim, blocks, expansion: group(dim, 1, expansion))

    def run(name: str, *args: str) -> SRCLI:
        monkeypatch.setattr(sys, "argv", ["train.py", "--config", f"configs/{name}", *ON_CPU, *args])
        monkeypatch.delenv("SR_RUN_DIR", raising=False)
        return SRCLI()

    return run


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_trains_two_steps(path, read):
    cli = read(path.name, *SMALL)
    cli.train()
    assert cli.trainer.global_step == 2
    assert sr.load(cli.weights.path).scale == cli.datamodule.scale
    head = "".join(line for line in path.open() if line.startswith("# "))
    assert "Result" in head and re.search("cost", head, re.IGNORECASE)


@pytest.mark.parametrize(
    ("name", "right", "wrong", "message"),
    [
        ("sparsesr_t.yaml", "sparsesr_t", "sparsesr_q", "sparsesr_q"),
        ("sparsesr_t.yaml", "data/df2k.yaml", "data/df3k.yaml", "data.train"),
        ("data/df2k.yaml", "root:", "folder:", "folder"),
        ("data/benchmarks.yaml", "Set5", "Set6", "datasets/benchmarks/Set6 does not exist"),
    ],
)
def test_a_mistake_in_any_part_of_a_config_is_found(read, name, right, wrong, message):
    path = Path("configs") / name
    path.write_text(path.read_text().replace(right, wrong))
    with pytest.raises(SRError, match=message):
        read("sparsesr_t.yaml", *SMALL).train()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_commands_at_the_head_of_a_config_are_right(path, read):
    """Those of other scales, above all, which override several values that belong together."""
    head = "".join(line.lstrip("# ") for line in path.open() if line.startswith("#   ")).replace("\\\n", "")
    scale = yaml.safe_load(path.read_text())["model"]["network"]["init_args"]["scale"]
    sizes = set()
    for command in head.splitlines():
        if command.startswith("python scripts/prepare_data.py distill"):
            assert re.search(rf" --config configs/{path.name} +--teacher \S+ --to datasets/\S+$", command)
            continue
        assert re.match(rf"python scripts/train(_scales)?\.py --config configs/{path.name}(?!\S)", command)
        args = command.split()[4:]
        options = dict(zip(args[::2], args[1::2], strict=True))
        if (minutes := options.pop("--minutes", None)) is not None:  # not of the training, but of train_scales.py
            assert "train_scales.py" in command and float(minutes) > 0
        if (weights := options.get("--model.weights")) is not None:  # what an earlier run has left
            Path(weights).parent.mkdir(parents=True, exist_ok=True)
            save(read(path.name).model.network, weights)
        cli = read(path.name, *(word for option in options.items() for word in option))
        assert cli.run_dir.parent.name == options.get("--name", path.stem)
        assert cli.model.network.scale == int(options.get("--model.network.scale", scale))
        assert cli.datamodule.gt_size % cli.model.network.scale == 0
        sizes.add(round(cli.datamodule.gt_size / cli.model.network.scale, -1))
    assert len(sizes) <= 1, "the LR patches have one size (ASSANet-S: 48 or 49) at all scales"


def test_the_readme_lists_every_config():
    text = (ROOT / "configs" / "README.md").read_text()
    listed = set()
    for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE):
        first, *sizes = re.findall(r"`(\w+)`", row)
        listed |= {first, *(first.rsplit("_", 1)[0] + size for size in sizes)}
    assert listed == {path.stem for path in CONFIGS}
