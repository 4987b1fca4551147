"""Weights by name: downloaded once, checked, kept; nothing here leaves the machine."""

import dataclasses
import functools
import hashlib
import http.server
import re
import threading
from pathlib import Path

import pytest
import torch

import sr
from sr.weights import NO_LICENCE, PRETRAINED, PretrainedWeights, default_weights, find_weights, list_weights

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "weights"
PUBLISHED = [record for record in PRETRAINED.values() if record.url]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sr" / "weights"


@pytest.fixture
def source(tmp_path):
    """A published file."""
    torch.manual_seed(0)
    folder = tmp_path / "published"
    folder.mkdir()
    torch.save(sr.archs.IMDN(scale=4, dim=16, blocks=1).state_dict(), folder / "tiny.pth")
    return folder / "tiny.pth"


@pytest.fixture
def publish(source, monkeypatch):
    """Makes the published file known under a name."""

    def add(url: str, **changes: object) -> PretrainedWeights:
        content = source.read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        record = PretrainedWeights("tiny_x4.published", "IMDN", 4, sha256, len(content), "MIT", "here", url=url)
        record = dataclasses.replace(record, **changes)
        monkeypatch.setitem(PRETRAINED, record.name, record)
        return record

    return add


@pytest.fixture
def server(source):
    """Address of the published file on loopback, and what was asked for."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=source.parent)
    ) as service:
        thread = threading.Thread(target=service.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{service.server_port}/tiny.pth", asked
        service.shutdown()
        thread.join()


def same(network, source):
    return all(torch.equal(network.state_dict()[k], v) for k, v in torch.load(source, weights_only=True).items())


def test_a_name_is_downloaded_once(publish, server, source, cache):
    url, asked = server
    record = publish(url)
    assert same(sr.load("tiny_x4.published"), source)
    assert same(sr.load("tiny_x4"), source)
    assert asked == ["/tiny.pth"]
    assert record.path == cache / "tiny_x4.published.pth"
    assert [p.name for p in cache.iterdir()] == ["tiny_x4.published.pth"]


def test_a_damaged_copy_is_replaced(publish, server, source, cache):
    record = publish(server[0])
    record.obtain()
    record.path.write_bytes(source.read_bytes()[:-1] + b"x")
    assert same(sr.load("tiny_x4"), source)
    assert len(server[1]) == 2


def test_file_addresses_work(publish, source):
    publish(source.as_uri())
    assert same(sr.load("tiny_x4.published"), source)


@pytest.mark.parametrize("changes", [{"sha256": "0" * 64}, {"size": 5}])
def test_another_file_than_the_recorded_one_is_refused(publish, server, cache, changes):
    publish(server[0], **changes)
    with pytest.raises(sr.SRError, match=r"sha256|not 5"):
        sr.load("tiny_x4.published")
    assert not list(cache.glob("*.pth"))


def test_offline_the_error_says_where_to_put_the_file(publish, source, monkeypatch):
    monkeypatch.setattr("sr.fetch.time.sleep", lambda seconds: None)
    record = publish("http://127.0.0.1:9/tiny.pth")
    with pytest.raises(sr.SRError, match=re.escape("http://127.0.0.1:9/tiny.pth cannot be downloaded")) as caught:
        sr.load("tiny_x4")
    assert str(caught.value).count("\n") == 1
    path = str(caught.value).split(" at ")[-1]
    Path(path).write_bytes(source.read_bytes())
    assert Path(path) == record.path
    assert same(sr.load("tiny_x4"), source)


def test_what_is_installed_needs_no_cache(cache):
    assert default_weights().obtain().is_file()
    assert not cache.exists()
    missing = dataclasses.replace(default_weights(), name="gone_x2.quickstart")
    with pytest.raises(sr.SRError, match="install the package again"):
        missing.obtain()


def test_defaults_are_installed_ones_of_the_smallest_scale_that_is_enough():
    installed = sorted(record.scale for record in PRETRAINED.values() if not record.url)
    for scale in (None, 0.5, 1.3, 2, 3, 3.5, 64):
        record = default_weights(scale)
        assert not record.url
        if scale is not None:
            assert record.scale == min((s for s in installed if s >= scale), default=installed[-1])


def test_names():
    assert list_weights() == sorted(PRETRAINED)
    assert find_weights("imdn_x4").name == "imdn_x4.published"
    assert find_weights("smfanet_plus_x3").name == "smfanet_plus_x3.df2k"
    with pytest.raises(sr.SRError, match=r"did you mean 'imdn_x4\.published'"):
        sr.load("imdn_x4.publishd")


@pytest.mark.parametrize("record", PUBLISHED, ids=lambda record: record.name)
def test_records_of_published_files_are_complete(record):
    model = sr.create_model(record.model, scale=record.scale)
    assert (model.arch, model.scale) == (record.arch, record.scale)
    # A commit, since a branch's file may change under the same address.
    assert re.fullmatch(r"https://raw\.githubusercontent\.com/[\w-]+/\w+/[0-9a-f]{40}/[\w/.]+\.pth", record.url)
    assert record.licence in ("MIT", "Apache-2.0", NO_LICENCE)
    for name, (psnr, ssim) in record.metrics.items():
        assert psnr == pytest.approx(record.paper[name][0], abs=0.06)  # RLFN-S on Set14; 0.02 else
        assert ssim == pytest.approx(record.paper[name][1], abs=5e-4)
    path = SHARED / record.url.rpartition("/")[2]
    if not path.exists():
        pytest.skip(f"{path} is not here")
    assert path.stat().st_size == record.size
    assert hashlib.sha256(path.read_bytes()).hexdigest() == record.sha256
    network = sr.load(path)
    assert network.hparams == model.hparams


@pytest.mark.network
@pytest.mark.parametrize("record", PUBLISHED, ids=lambda record: record.name)
def test_published_files_are_where_the_records_say(record):
    assert sr.load(record.name).scale == record.scale
