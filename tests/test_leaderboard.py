"""The leaderboard: every run once, interrupted ones continued, and the published sizes in the shipped config."""

import copy
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

import sr
from sr import efficiency, leaderboard
from sr.checkpoint import resume_step
from sr.cli import main as train_main
from sr.data import find_pictures
from sr.errors import SRError
from sr.evaluation import SetScores, evaluate, open_models
from sr.leaderboard import pareto_front, read_settings, run_leaderboard
from sr.metrics import PROTOCOLS
from sr.module import SRModule

ROOT = Path(__file__).parents[1]
STEPS = 2


class Trainer:
    """Trains in this process, and keeps the arguments of each call."""

    def __init__(self):
        self.calls = []

    def __call__(self, arguments):
        self.calls.append(list(arguments))
        train_main(list(arguments))

    def runs(self):
        return [(Path(c[c.index("--runs") + 1]).name, c[c.index("--seed_everything") + 1]) for c in self.calls]


@pytest.fixture(autouse=True)
def no_memory(monkeypatch):
    monkeypatch.setattr(efficiency, "extra_memory", lambda *args: 12.3)  # starts processes


@pytest.fixture
def content(config):
    """A leaderboard's file of two tiny networks with two seeds each."""
    sparse = {"class_path": "sr.archs.SparseSR", "init_args": config["model"].pop("network")["init_args"]}
    del sparse["init_args"]["scale"]
    safmn = {"arch": "SAFMN", "args": {"dim": 8, "n_blocks": 1}}
    val = config["data"].pop("val")[0]["init_args"]["root"]
    config["trainer"] |= {"max_steps": STEPS, "val_check_interval": 1, "enable_progress_bar": False, "logger": False}
    return {
        "leaderboard": {
            "networks": {"tiny": sparse, "SAFMN": {"class_path": "sr.archs.SpandrelNetwork", "init_args": safmn}},
            "train": config,
            "data": [val],
            "scale": 2,
            "seeds": [0, 1],
            "size": [32, 24],
            "timing": {"repeats": 2},
        }
    }


@pytest.fixture
def settings(content):
    Path("board.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return read_settings("board.yaml")


def test_trains_scores_times_and_goes_on_where_it_stopped(settings, monkeypatch, tmp_path):
    """Interrupted in the third of four runs."""
    output, train = Path("out"), Trainer()
    third = output / "SAFMN" / "seed0" / "001" / "checkpoints" / "last.ckpt"
    step = SRModule.training_step

    def interrupt(self, *args):
        if len(train.calls) == 3 and self.trainer.global_step == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SRModule, "training_step", interrupt)
        with pytest.raises(SystemExit):
            run_leaderboard(settings, output, train)
    assert train.runs() == [("tiny", "0"), ("tiny", "1"), ("SAFMN", "0")]
    network = sr.archs.SpandrelNetwork(scale=2, arch="SAFMN", args={"dim": 8, "n_blocks": 1})
    assert resume_step(third, network) == 1
    assert not (output / "leaderboard.md").exists()

    train = Trainer()
    board = run_leaderboard(settings, output, train)
    assert train.runs() == [("SAFMN", "0"), ("SAFMN", "1")]
    assert train.calls[0][-2:] == ["--ckpt_path", str(third)] and "--ckpt_path" not in train.calls[1]
    assert resume_step(third, network) == STEPS
    assert board.seeds == {"tiny": [0, 1], "SAFMN": [0, 1]} and not board.failed

    # The scores are those that evaluating the last checkpoints gives.
    pictures = find_pictures(settings.data[0], 2)
    (model,) = open_models([str(third)])
    result = SetScores("val", 2, ["bicubic", "last"], list(evaluate([model], pictures, [PROTOCOLS["sisr-y"]])))
    own, bicubic = (result.mean(who, PROTOCOLS["sisr-y"]) for who in ("last", "bicubic"))
    assert board.scores["SAFMN"]["val"][0] == {"psnr": own.psnr, "ssim": own.ssim}
    assert board.scores["bicubic"]["val"] == [{"psnr": bicubic.psnr, "ssim": bicubic.ssim}]
    both = [score["psnr"] for score in board.scores["SAFMN"]["val"]]
    assert both[0] != both[1]  # the seeds are different runs

    table = (output / "leaderboard.md").read_text()
    assert f"{sum(both) / 2:.3f}/" in table and f" ± {abs(both[0] - both[1]) / 2:.3f}" in table
    rows = [line.split("|")[1].strip(" *") for line in table.splitlines() if line.startswith("|")]
    assert rows[:3] == ["network", "---" + rows[1][3:], "bicubic"] and set(rows[3:5]) == {"tiny", "SAFMN"}
    assert "`tiny`, which has e^2 = 7.389" in table and "7.389 |" in table
    saved = json.loads((output / "leaderboard.json").read_text())
    assert saved["networks"]["SAFMN"]["scores"] == {"val": board.scores["SAFMN"]["val"]}
    assert saved["networks"]["tiny"]["card"]["ntire"] == {"score": pytest.approx(7.38905609893065), "baseline": "tiny"}
    with Image.open(output / "leaderboard.png") as image:
        assert image.width > 500 and len(image.convert("RGB").getcolors(1 << 24)) > 50

    # Once more, of what a published leaderboard consists of: nothing is trained or scored again.
    monkeypatch.setattr(leaderboard, "evaluate", None)
    for run in output.glob("*/seed*/001"):
        shutil.rmtree(run)
    train = Trainer()
    again = run_leaderboard(settings, output, train)
    assert not train.calls and again.scores == board.scores

    # A set that comes later cannot be scored without the weights.
    more = copy.deepcopy(settings)
    more.data.append(more.train["data"]["train"]["init_args"]["root"])
    with pytest.raises(SRError, match="no run is finished: its scores are there, but not its weights"):
        run_leaderboard(more, output, train)
    assert not train.calls

    # Runs of other settings are not mixed with these.
    changed = copy.deepcopy(settings)
    changed.train["model"]["optimizer"]["init_args"]["lr"] = "2e-3"
    with pytest.raises(SRError, match="trained with other settings"):
        run_leaderboard(changed, output, train)
    assert not train.calls


def test_a_failed_run_does_not_stop_the_others(settings):
    train = Trainer()

    def fail(arguments):
        if "SAFMN" in str(arguments):
            raise SRError("the training stopped with status 2")
        train(arguments)

    settings.seeds.remove(1)
    board = run_leaderboard(settings, Path("out"), fail)
    assert board.failed == {"SAFMN, seed 0": "the training stopped with status 2"}
    assert list(board.cards) == ["tiny"]
    assert "Left out: SAFMN, seed 0: the training stopped" in Path("out/leaderboard.md").read_text()
    shutil.rmtree("out")
    with pytest.raises(SRError, match="no run is finished: the training ended before its last step"):
        run_leaderboard(settings, Path("out"), lambda arguments: None)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("nettworks", {}, "no 'nettworks'; did you mean 'networks'"),
        ("timing", {"repeat": 3}, "no 'repeat'; did you mean 'repeats'"),
        ("networks", [], "networks is a dict that is not empty"),
        ("seeds", [], "seeds is a list that is not empty"),
        ("networks", {"a": {}}, "the network a needs a class_path"),
        ("networks", {"a": {"class_path": "x.y", "lr": 1}}, "knows class_path, init_args and seeds, not 'lr'"),
        ("networks", {"a/b": {"class_path": "x.y"}}, "the network a/b names a folder"),
        ("networks", {"a": {"class_path": "sr.archs.Nothing"}}, "the network a cannot be built: .*Nothing"),
        ("networks", {"a": {"class_path": "sr.archs.smfanet", "init_args": {"dmi": 3}}}, "a cannot be built: .*dmi"),
        ("networks", {"a": {"class_path": "torch.nn.Identity"}}, "the network a is no SRNetwork of scale 2"),
        ("data", ["nowhere"], "nowhere"),
        ("train", {"model": {}}, "needs model .* and trainer.max_steps"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(content, key, value, message):
    content["leaderboard"][key] = value
    Path("board.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    train = Trainer()
    with pytest.raises(SRError, match=message):
        run_leaderboard(read_settings("board.yaml"), Path("out"), train)
    assert not train.calls


@pytest.mark.parametrize(
    ("text", "message"), [("model: {}", "no section"), ("a: [", "is not YAML"), (None, "cannot read")]
)
def test_a_file_that_is_no_leaderboard(tmp_path, text, message):
    path = tmp_path / "board.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SRError, match=message):
        read_settings(path)


def test_the_last_set_ranks(settings):
    """Two networks that two sets order differently."""
    scores = {"bicubic": (20.0, 20.0), "tiny": (30.0, 25.0), "SAFMN": (29.0, 25.5)}
    sets = {
        name: {key: [{"psnr": psnr, "ssim": 0.5}] for key, psnr in zip(("Set5", "B100"), both, strict=True)}
        for name, both in scores.items()
    }
    networks = {name: leaderboard._build(name, settings.networks[name], 2) for name in ("tiny", "SAFMN")}
    cards = efficiency.cards(networks, size=(32, 24), run=efficiency.Run(repeats=2))
    board = leaderboard.Board(settings, {"tiny": [0], "SAFMN": [0]}, sets, cards, {})
    assert board.ranking == "B100" and board.psnr("SAFMN") == 25.5
    rows = [line.split("|")[1].strip(" *") for line in board.markdown().splitlines() if line.startswith("|")]
    assert rows[2:5] == ["bicubic", "SAFMN", "tiny"]
    assert json.loads(board.json())["ranking"] == "B100"


def test_pareto_front():
    points = {"slow": (9.0, 30.0), "fast": (1.0, 27.0), "worse": (5.0, 26.0), "good": (2.0, 29.0), "equal": (2.0, 28.0)}
    assert pareto_front(points) == ["fast", "good", "slow"]
    assert pareto_front({"a": (1.0, 2.0), "b": (1.0, 2.0)}) == ["a"]


@pytest.fixture
def benchmark_script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    spec = importlib.util.spec_from_file_location("benchmark_script", ROOT / "scripts" / "benchmark.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_trains_in_a_process_of_its_own(benchmark_script, content, monkeypatch, capfd):
    del content["leaderboard"]["networks"]["SAFMN"]
    content["leaderboard"]["seeds"] = [3]
    Path("board.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    threads = str(torch.get_num_threads())
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--threads", threads, "leaderboard", "--config", "board.yaml"])
    benchmark_script.main()
    assert re.search(r"\| tiny \* +\| 1 +\|", capfd.readouterr().out)
    assert Path("runs/board/tiny/seed3/001/best.safetensors").is_file()
    assert Path("runs/board/leaderboard.png").is_file()


def test_how_a_training_process_ends_is_understood(benchmark_script, monkeypatch, tmp_path):
    (tmp_path / "ends.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    monkeypatch.setattr(benchmark_script.leaderboard, "_TRAIN", tmp_path / "ends.py")
    benchmark_script.leaderboard.train(["0"])
    with pytest.raises(SRError, match="stopped with status 2"):
        benchmark_script.leaderboard.train(["2"])
    for status in ("130", "143"):  # asked to stop: the others are not to be trained, either
        with pytest.raises(KeyboardInterrupt):
            benchmark_script.leaderboard.train([status])


# As published for x4: in the networks' papers, or what their authors' own code or weights count.
PARAMETERS = {"SAFMN": 239_520, "SwinIR-light": 929_628, "Compact": 621_424, "smfanet": 197_328}


def test_the_shipped_networks_have_their_published_sizes():
    settings = read_settings(ROOT / "configs" / "leaderboard_cpu.yaml")
    assert settings.scale == 4 and settings.seeds == [0, 1] and PARAMETERS.keys() <= settings.networks.keys()
    for name, entry in settings.networks.items():
        network = leaderboard._build(name, entry, 4)
        parameters = sum(p.numel() for p in network.parameters())
        assert parameters == PARAMETERS.get(name, parameters), name
        with torch.inference_mode():
            assert network.eval()(torch.rand(1, 3, 17, 20)).shape == (1, 3, 68, 80)


def test_the_shipped_training_config_trains(monkeypatch, tmp_path):
    settings = read_settings(ROOT / "configs" / "leaderboard_cpu.yaml")
    config = copy.deepcopy(settings.train)
    config["data"]["train"]["init_args"]["root"] = str(ROOT / "datasets" / "sample" / "train")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SR_RUN_DIR", raising=False)
    network = {"class_path": "sr.archs.sparsesr_t", "init_args": {"scale": 4}}
    config["model"]["network"] = network
    Path("train.yaml").write_text(yaml.safe_dump(config))
    train_main(["--config", "train.yaml", "--trainer.max_steps", "1"])
    assert resume_step("runs/train/001/checkpoints/last.ckpt", sr.create_model("sparsesr_t", scale=4)) == 1
