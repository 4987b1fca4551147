"""The scripts and the README's commands, as a user runs them."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import sr

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def run(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def script(name: str, *args: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return run(ROOT / "scripts" / f"{name}.py", *args, cwd=cwd)


@pytest.fixture
def picture(tmp_path):
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8)).save(tmp_path / "image.png")
    return tmp_path / "image.png"


def test_upscale_needs_no_option(picture):
    result = script("upscale", picture)
    assert result.returncode == 0, result.stderr
    with Image.open(picture.with_name("image_x2.png")) as image:
        assert image.size == (14, 18)


def test_gallery_shows_bicubic_above_the_network(make_pictures, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import gallery

    root = make_pictures("set", ["a.png", "b.png"])
    monkeypatch.setattr(gallery, "_SIZE", (60, 45))
    args = ("-m", "sparsesr_t_x2.quickstart", "--photographs", str(root), "--crop", "0", "0", "16", "12")
    monkeypatch.setattr(sys, "argv", ["gallery.py", *args, "--photograph", "a", "--output", str(tmp_path / "out")])
    gallery.main()
    with Image.open(root / "a.png") as whole, Image.open(tmp_path / "out" / "photograph.png") as sheet:
        bicubic = whole.crop((0, 0, 16, 12)).resize((32, 24), Image.Resampling.BICUBIC)
        assert sheet.size == (32, 54)
        assert np.array_equal(np.asarray(sheet)[:24], np.asarray(bicubic))
    assert {p.stem for p in (tmp_path / "out").glob("*.png")} == {"photograph", "drawing", "screenshot", "scan"}
    assert {p.stem for p in (tmp_path / "out").glob("strips/x2/strips/*/*.png")} == {"a", "b"}
    monkeypatch.setattr(sys, "argv", ["gallery.py", *args, "--photograph", "gone", "--output", str(tmp_path / "none")])
    with pytest.raises(sr.SRError, match="no picture gone"):
        gallery.main()
    assert not (tmp_path / "none").exists()


def test_evaluate_prints_each_picture_and_the_mean(make_pictures, tmp_path):
    root = make_pictures("set", ["a.png", "b.png"])
    sr.save(sr.create_model("sparsesr_t", scale=2), tmp_path / "untrained.safetensors")
    result = script("evaluate", "-m", tmp_path / "untrained.safetensors", "--data", root, "--scale", "2")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    pictures = [line.split() for line in lines[1:3]]
    assert [row[0] for row in pictures] == ["a", "b"]
    table = {row[1]: row[3] for line in lines if line.startswith("| ") and (row := line.split())}
    for column, name in ((1, "bicubic"), (2, "untrained")):  # the mean of per-picture values
        values = [float(row[column].split("/")[0]) for row in pictures]
        assert float(table[name].split("/")[0]) == pytest.approx(sum(values) / 2, abs=2e-3)
    # An untrained network is bicubic, but for the border, which a crop of the scale does not remove entirely.
    assert all(abs(float(row[1].split("/")[0]) - float(row[2].split("/")[0])) < 0.5 for row in pictures)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data", "nowhere"], "nowhere does not exist"),
        (["--data", "set", "--scale", "3"], "enlarges 2 times, not 3"),
    ],
)
def test_mistakes_in_evaluating_take_one_line(make_pictures, tmp_path, args, message):
    make_pictures("set")
    result = script("evaluate", "-m", "sparsesr_t_x2", *args, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_readme_commands_run(picture, monkeypatch):
    """Each command of the README in its order, the training cut to a few steps and pip and pytest left to .ci/run."""
    folder = picture.parent
    for name in ("scripts", "configs", "datasets"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "pictures").mkdir()
    shutil.copy(picture, folder / "pictures")
    commands = [part for block in readme_blocks("bash") for part in re.split(r" && |\n", block.strip())]
    seen = set()
    for command in commands:
        words = shlex.split(command)
        if words[0] in ("pip", "pytest"):
            continue
        assert words[0] == "python"
        if "train.py" in words[1]:
            words += ["--trainer.max_steps", "2", "--data.batch_size", "2"]
        result = run(*words[1:], cwd=folder)
        assert result.returncode == 0, f"{command}\n{result.stderr}"
        seen.add(Path(words[1]).stem)
    assert seen == {"train", "upscale", "evaluate", "convert"}
    (example,) = readme_blocks("python")
    (folder / "out.png").unlink()
    result = run("-c", example, cwd=folder)
    assert result.returncode == 0, result.stderr
    with Image.open(folder / "out.png") as image:
        assert image.size == (14, 18)


def test_readme_names_only_files_that_exist():
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link).exists(), link
