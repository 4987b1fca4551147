"""Two hundred damaged and hostile files: one clear line for each, and nothing of them runs or takes memory."""

import io
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import sr

ROOT = Path(__file__).resolve().parents[1]
SECONDS, BYTES = 2.0, 500 << 20  # of processor time, of address space above what the libraries take

READER = """
import json, resource, sys, time, torch, sr, spandrel
torch.set_num_threads(1)
sr.load(sys.argv[1])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]),) * 2)
for path in sys.argv[3:]:
    start = time.process_time()
    try:
        network = sr.load(path)
        said = ""
        total = sum(v.double().abs().sum().item() for v in network.state_dict().values())
    except sr.SRError as e:
        said, total = str(e), 0.0
    print(json.dumps([path, said, total, time.process_time() - start]), flush=True)
"""


class Wants:
    """Pickles into a call."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def network():
    torch.manual_seed(0)
    return sr.archs.RLFN(scale=2, dim=4, blocks=1)


def archive(path, entries, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in entries.items():
            file.writestr(name, content)


def hostile(folder, canary):
    """Files made to do harm, by name."""
    touch = f"touch {canary}"
    calls = {
        "system": Wants(os.system, touch),
        "popen": Wants(subprocess.Popen, ["touch", str(canary)]),
        "exec": Wants(exec, f"open({str(canary)!r}, 'w')"),
        "eval": Wants(eval, f"open({str(canary)!r}, 'w')"),
        "open": Wants(open, str(canary), "w"),
        "bytearray": Wants(bytearray, 1 << 33),
    }
    for name, call in calls.items():
        for protocol in (0, 2, 4):
            (folder / f"{name}{protocol}.pth").write_bytes(pickle.dumps({"params": call}, protocol))
        torch.save({"params": {"a": torch.zeros(1)}, "x": call}, folder / f"{name}_zip.pth")
        torch.save({"x": call}, folder / f"{name}_old.ckpt", _use_new_zipfile_serialization=False)
    good = io.BytesIO()
    torch.save({"a": torch.zeros(4)}, good)
    with zipfile.ZipFile(good) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    archive(folder / "bomb.pth", entries | {"archive/data/0": bytes(1 << 28)}, zipfile.ZIP_DEFLATED)
    archive(folder / "no_pickle.pth", {"archive/data/0": b"x"})
    archive(folder / "script.pt", entries | {"archive/constants.pkl": b"x", "archive/code/a.py": b"x"})
    (folder / "prefixed.pth").write_bytes(b"PK\3\4" + bytes(60) + good.getvalue())
    large = bytearray(good.getvalue())
    at = large.find(b"PK\x01\x02")
    large[at + 20 : at + 28] = struct.pack("<II", 1 << 30, 1 << 30)  # compressed and real size of the first entry
    (folder / "lies.pth").write_bytes(large)
    torch.save({"conv.weight": torch.zeros(1).expand(10**6, 3, 1000, 1000)}, folder / "expanded.pth")
    torch.save({"conv.weight": torch.zeros(3, 3).to_sparse()}, folder / "sparse.pth")
    torch.save({"conv.weight": torch.zeros(3, 3, dtype=torch.complex64)}, folder / "complex.pth")
    torch.save({"upsampler.0.weight": torch.zeros(0, 10**9)}, folder / "empty_tensor.pth")
    (folder / "many.pth").write_bytes(b"\x80\x02" + b"N0" * 3_000_000 + b"N.")
    for name, header in {
        "length": struct.pack("<Q", 1 << 62) + b"{}",
        "shape": {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}},
        "offsets": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [1 << 40, (1 << 40) + 4]}},
        "overlap": {n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"},
        "arch": {"__metadata__": {"arch": "SparseSR", "hparams": '{"blocks": 1000000000}'}},
        "size": {"__metadata__": {"arch": "RLFN", "hparams": '{"dim": 200000}'}},
        "class": {"__metadata__": {"arch": "os.system", "hparams": "{}"}},
        "window": {
            "__metadata__": {
                "arch": "SpandrelNetwork",
                "hparams": '{"arch": "SwinIR", "args": {"window_size": 150, "img_size": 300}}',
            }
        },
    }.items():
        if isinstance(header, dict):
            if "__metadata__" in header:
                header["a"] = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
            text = json.dumps(header).encode()
            header = struct.pack("<Q", len(text)) + text + bytes(4)
        (folder / f"{name}.safetensors").write_bytes(header)


def damaged(folder, count):
    """Flipped, cut and random files of both formats, by a seed; the originals' names end in ``good``."""
    net, rng = network(), random.Random(0)
    sr.save(net, folder / "good.safetensors")
    torch.save({"params": net.state_dict()}, folder / "good.pth")
    for i in range(count):
        suffix = (".safetensors", ".pth")[i % 2]
        content = bytearray((folder / f"good{suffix}").read_bytes())
        kind = ("flip", "cut", "noise", "hole")[i // 2 % 4]
        if kind == "flip":
            for _ in range(rng.randrange(1, 4)):
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del content[rng.randrange(len(content)) :]
        elif kind == "noise":
            head = content[:9] if i % 3 else b""
            content = head + rng.randbytes(rng.randrange(1, 5000))
        else:
            at = rng.randrange(len(content))
            content[at : at + 64] = rng.randbytes(64)
        (folder / f"{kind}{i}{suffix}").write_bytes(content)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's here")
def test_two_hundred_files(tmp_path):
    folder, canary = tmp_path / "files", tmp_path / "canary"
    folder.mkdir()
    hostile(folder, canary)
    damaged(folder, 200 - len(list(folder.iterdir())))
    files = [str(path) for path in sorted(folder.iterdir()) if path.stem != "good"]
    good = str(folder / "good.safetensors")
    command = [sys.executable, "-c", READER, good, str(BYTES), *files, good]
    out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert out.returncode == 0, out.stderr[-2000:]
    results = [json.loads(line) for line in out.stdout.splitlines()]
    assert len(results) == len(files) + 1 == 201
    whole = sum(v.double().abs().sum().item() for v in network().state_dict().values())
    for path, said, total, seconds in results:
        if said:
            assert "\n" not in said and len(said) < 800, path
        else:  # what was hit is no part of the weights, as the time of an entry
            assert total == whole and Path(path).name.startswith(("flip", "hole", "good")), path
        assert seconds < SECONDS, (path, seconds)
    assert results[-1][1] == ""
    assert sum(bool(said) for _, said, *_ in results) > 180
    assert not canary.exists()
    said = {Path(path).name: text for path, text, *_ in results}
    for name in ("system", "popen", "exec", "eval", "open", "bytearray"):
        for ending in ("0.pth", "2.pth", "4.pth", "_zip.pth", "_old.ckpt"):
            assert "refused, since reading it would run code from the file: it asks for" in said[name + ending]
    assert "posix.system" in said["system4.pth"]
    assert "Popen" in said["popen_zip.pth"]
    assert "compressed" in said["bomb.pth"]
    assert "TorchScript" in said["script.pt"]
    assert "two ways" in said["prefixed.pth"]
    assert "claim more than the file holds" in said["expanded.pth"]
    assert "complex tensor" in said["complex.pth"]
    assert "_rebuild_sparse_tensor" in said["sparse.pth"]
    for name in ("arch", "size", "window"):
        assert "hyper-parameters do not fit" in said[f"{name}.safetensors"]


def test_pipes_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "x.pth")
    with pytest.raises(sr.SRError, match="is not a file, but a device or a pipe"):
        sr.load(tmp_path / "x.pth")
