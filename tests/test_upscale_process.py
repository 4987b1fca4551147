"""scripts/upscale.py as a process: pipes, what it imports, interruptions and kills."""

import io
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from upscaling import SCRIPT, files, pixels_of

import sr
from sr.weights import default_weights


def command(*args: object, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, args)], capture_output=True, **options)


def test_in_a_pipe(tmp_path):
    """Through real pipes; sparse attention and all."""
    rng = np.random.default_rng(0)
    data = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8)).save(data, "PNG")
    result = command("-", cwd=tmp_path, input=data.getvalue())
    assert result.returncode == 0 and b"- -> -  7x9 -> 14x18" in result.stderr
    with Image.open(data) as image:
        expected = np.asarray(sr.Upscaler(sr.load(default_weights().name), device="cpu")(image))
    # The number of threads decides the order of sums.
    assert np.abs(pixels_of(io.BytesIO(result.stdout)).astype(int) - expected).max() <= 1


def test_a_reader_that_leaves_does_not_end_the_batch(tmp_path, make_pictures):
    make_pictures("in", [f"{i}.png" for i in range(4)])
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "in", "-o", "out"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait() == 0, err
    assert files(tmp_path / "out") == [f"{i}.png" for i in range(4)]
    assert err.count("\n") == 1 and err.startswith("4 done")


def imported(err: bytes) -> set[str]:
    return {line.rsplit(b"|", 1)[-1].strip().decode().partition(".")[0] for line in err.splitlines() if b"|" in line}


def test_it_imports_what_it_needs(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for args, unwanted in ((["--help"], {"torch", "sr"}), (["a.png"], set())):
        result = subprocess.run(
            [sys.executable, "-X", "importtime", str(SCRIPT), *args], cwd=tmp_path, capture_output=True, check=True
        )
        assert "argparse" in imported(result.stderr)
        slow = {"lightning", "torchvision", "torchmetrics", "kornia", "spandrel", "rich", "timm", "matplotlib", "scipy"}
        assert not imported(result.stderr) & (unwanted | slow)


def start(folder: Path, *args: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "in", "-o", "out", *args],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def wait_for_results(folder: Path, count: int, process: subprocess.Popen) -> None:
    while len(list(folder.glob("out/*.png"))) < count:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)


@pytest.mark.slow
def test_an_interruption_leaves_whole_files_only(tmp_path, make_pictures):
    make_pictures("in", {f"{i:03d}.png": (96, 96) for i in range(200)})
    process = start(tmp_path)
    wait_for_results(tmp_path, 3, process)
    process.send_signal(signal.SIGINT)
    err = process.stderr.read().decode()
    assert process.wait() == 130 and err.splitlines()[-1] == "stopped" and "Traceback" not in err
    results = sorted((tmp_path / "out").iterdir())
    assert 3 <= len(results) < 200
    for path in results:
        assert pixels_of(path).shape == (192, 192, 3)


@pytest.mark.slow
def test_a_killed_batch_resumes_to_the_same_results(tmp_path, make_pictures):
    sizes = {f"{i:02d}.png": (40 + 7 * i % 90, 150 - 11 * i % 90) for i in range(40)}
    make_pictures("in", sizes)
    assert start(tmp_path).wait() == 0
    expected = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    shutil.rmtree(tmp_path / "out")
    for count in (2, 9, 17, 30):
        process = start(tmp_path, "--skip-existing")
        wait_for_results(tmp_path, count, process)
        process.kill()
        process.wait()
        for path in (tmp_path / "out").glob("*.png"):  # each is whole
            assert path.read_bytes() == expected[path.name]
    assert start(tmp_path, "--skip-existing").wait() == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == expected
