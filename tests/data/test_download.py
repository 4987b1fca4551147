"""Preparing data sets from small archives, honest and hostile, over loopback and from files."""

from __future__ import annotations

import functools
import hashlib
import http.server
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_archives import tar_of, zip_of

import sr.data.download as module
from sr.data import BenchmarkFolder, GTFolder
from sr.data.archives import ArchiveError
from sr.data.download import SETS, Archive, DataSet, download, prepare
from sr.errors import SRError
from sr.fetch import FetchError

MakePictures = Callable[..., Path]


def quiet(line: str) -> None:
    pass


def record(path: Path, url: str, inside: str, folder: str) -> Archive:
    return Archive(url, inside, folder, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str, list[str]]]:
    """A folder on a web server: the folder, its address, and the paths asked for."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    root = tmp_path / "site"
    root.mkdir()
    handler = functools.partial(Handler, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield root, f"http://127.0.0.1:{httpd.server_port}", asked
        httpd.shutdown()
        thread.join()


@pytest.fixture
def two_archives(site: tuple[Path, str, list[str]], files: dict[str, bytes]) -> DataSet:
    """A data set of a zip file and a tar file, the latter from the second of two addresses."""
    root, url, _ = site
    train = zip_of(root / "train.zip", files)
    valid = tar_of(root / "valid.tar", {"./x/valid/0801.png": files["other/0004.png"]})
    return DataSet(
        "Made",
        (
            record(train, f"{url}/train.zip", "set", "train_HR"),
            Archive(f"{url}/gone.tar", "x/valid", "valid_HR"),
            record(valid, f"{url}/valid.tar", "x/valid", "valid_HR"),
        ),
        {"train_HR": 3, "valid_HR": 1},
        gigabytes=1e-4,
        terms="Made is for tests.",
    )


def contents(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


# --- a whole data set --------------------------------------------------------------------------------------------


def test_prepares_checks_and_then_does_nothing(site, two_archives: DataSet, files, tmp_path: Path) -> None:
    asked, said = site[2], []
    folder = prepare(two_archives, tmp_path / "data", {}, said.append)
    assert folder == tmp_path / "data" / "Made"
    # Nothing but the pictures of the record is left, in neither the folder nor beside it.
    assert contents(tmp_path / "data") == [
        "Made/train_HR/0001.png",
        "Made/train_HR/0002.png",
        "Made/train_HR/more/0003.png",
        "Made/valid_HR/0801.png",
    ]
    assert (folder / "train_HR/more/0003.png").read_bytes() == files["set/more/0003.png"]
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["Made"]
    assert asked == ["/train.zip", "/gone.tar", "/valid.tar"]
    assert said[0].startswith("Made is for tests.\nMade takes up to 0.2 MB")
    assert any("404" in line for line in said)
    pictures = GTFolder(folder / "train_HR")
    pictures.prepare(2)
    assert pictures.names == ["0001", "0002", "more/0003"]

    said.clear()
    assert prepare(two_archives, tmp_path / "data", {}, said.append) == folder
    assert said == [f"Made is complete already, in {folder}"]
    assert len(asked) == 3


def test_archives_that_are_here_are_not_downloaded(site, two_archives: DataSet, tmp_path: Path) -> None:
    root, _, asked = site
    given = {"valid.tar": shutil.copy(root / "valid.tar", tmp_path / "valid.tar")}
    prepare(two_archives, tmp_path / "data", given, quiet)
    assert asked == ["/train.zip"]
    assert (tmp_path / "valid.tar").exists()
    given |= {"train.zip": root / "train.zip"}
    prepare(two_archives, tmp_path / "again", given, quiet)
    assert asked == ["/train.zip"]
    assert contents(tmp_path / "again") == contents(tmp_path / "data")


def test_given_archive_is_checked(two_archives: DataSet, files, tmp_path: Path) -> None:
    wrong = zip_of(tmp_path / "train.zip", files | {"set/readme.txt": b"tex!"})
    with pytest.raises(SRError, match=r"train\.zip has the sha256 .*another version"):
        prepare(two_archives, tmp_path / "data", {"train.zip": wrong}, quiet)
    assert not (tmp_path / "data" / "Made").exists()


@pytest.mark.parametrize("at", ["download", "unpack", "rename"])
def test_interrupted_anywhere_goes_on(site, two_archives: DataSet, tmp_path: Path, monkeypatch, at: str) -> None:
    """Ctrl-C (or a kill, which leaves no less) at each stage: no folder of that name, and the next call succeeds."""
    asked = site[2]

    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        if at == "download":
            patched.setattr("sr.fetch._append", stop)
        elif at == "unpack":
            original = shutil.copyfileobj
            calls: list[int] = []

            def copy_one(*args: object) -> None:
                calls.append(1)
                original(*args) if len(calls) < 2 else stop()  # type: ignore[arg-type]

            patched.setattr("sr.data.archives.shutil.copyfileobj", copy_one)
        else:
            patched.setattr(module, "_miscounted", stop)
        prepare(two_archives, tmp_path, {}, quiet)
    assert not (tmp_path / "Made").exists()
    before = len(asked)
    prepare(two_archives, tmp_path, {}, quiet)
    assert contents(tmp_path / "Made")[0] == "train_HR/0001.png" and len(contents(tmp_path / "Made")) == 4
    # What was complete is not asked for again.
    assert (
        asked[before:]
        == {
            "download": ["/train.zip", "/gone.tar", "/valid.tar"],
            "unpack": ["/gone.tar", "/valid.tar"],
            "rename": [],
        }[at]
    )
    assert not (tmp_path / ".Made.partial").exists()


def test_remains_of_a_killed_unpacking_are_swept(two_archives: DataSet, tmp_path: Path) -> None:
    stale = tmp_path / ".Made.partial" / "pictures" / "train_HR.unpacking"
    stale.mkdir(parents=True)
    (stale / "half.png").write_bytes(b"half")
    prepare(two_archives, tmp_path, {}, quiet)
    assert "train_HR/half.png" not in contents(tmp_path / "Made") and len(contents(tmp_path / "Made")) == 4


def test_wrong_number_of_pictures(site, files, tmp_path: Path) -> None:
    root, url, asked = site
    zip_of(root / "a.zip", files)
    data = DataSet("Made", (Archive(f"{url}/a.zip", "set", "."),), {".": 4}, 1e-4, "")
    for _ in range(2):  # and it does not stick
        with pytest.raises(SRError, match=r"held 3 instead of 4 pictures"):
            prepare(data, tmp_path / "data", {}, quiet)
        assert not (tmp_path / "data" / "Made").exists()
    assert asked == ["/a.zip"] * 2


def test_folder_that_holds_something_else_is_left_alone(two_archives: DataSet, tmp_path: Path) -> None:
    (tmp_path / "Made" / "train_HR").mkdir(parents=True)
    (tmp_path / "Made" / "train_HR" / "mine.png").write_bytes(b"mine")
    with pytest.raises(SRError, match=r"1 instead of 3 pictures in train_HR, 0 instead of 1 .* move it away"):
        prepare(two_archives, tmp_path, {}, quiet)
    assert contents(tmp_path / "Made") == ["train_HR/mine.png"]


def test_damaged_download_without_checksum_is_not_kept(site, files, tmp_path: Path) -> None:
    root, url, _ = site
    whole = zip_of(root / "a.zip", files).read_bytes()
    data = DataSet("Made", (Archive(f"{url}/a.zip", "set", "."),), {".": 3}, 1e-4, "")
    (root / "a.zip").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArchiveError, match="damaged"):
        prepare(data, tmp_path / "data", {}, quiet)
    (root / "a.zip").write_bytes(whole)
    prepare(data, tmp_path / "data", {}, quiet)
    assert len(contents(tmp_path / "data" / "Made")) == 3


def test_no_source_works(site, two_archives: DataSet, tmp_path: Path) -> None:
    for file in site[0].iterdir():
        file.write_bytes(b"another file")
    with pytest.raises(FetchError, match="12 bytes long") as caught:
        prepare(two_archives, tmp_path / "data", {}, quiet)
    assert "give train.zip from elsewhere with --from" in str(caught.value)
    assert str(caught.value).count("\n") == 1


def test_needs_space_before_it_starts(site, two_archives: DataSet, tmp_path: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("sr.fetch.shutil.disk_usage", lambda folder: usage._replace(free=150_000))
    with pytest.raises(SRError, match=r"0\.2 MB are needed in .* only 0\.15 MB are free"):
        prepare(two_archives, tmp_path / "data", {}, quiet)
    assert site[2] == []
    # Half of that is enough for one who has the archives.
    prepare(two_archives, tmp_path / "other", {f.name: f for f in site[0].iterdir()}, quiet)
    # What an earlier call has left is not needed again.
    (tmp_path / "data" / ".Made.partial" / "of an earlier call").write_bytes(bytes(60_000))
    prepare(two_archives, tmp_path / "data", {}, quiet)


def test_archives_by_hand_only(site, two_archives: DataSet, tmp_path: Path) -> None:
    data = DataSet("Made", two_archives.archives, two_archives.pictures, 1e-4, "", by_hand="ask for it")
    with pytest.raises(SRError, match=r"(?s)ask for it.*--from: train\.zip, gone\.tar"):
        prepare(data, tmp_path / "data", {}, quiet)
    assert site[2] == []
    prepare(data, tmp_path / "data", {f.name: f for f in site[0].iterdir()}, quiet)
    assert len(contents(tmp_path / "data" / "Made")) == 4


def test_two_processes(two_archives: DataSet, tmp_path: Path) -> None:
    said = []

    def second(line: str) -> None:
        if not said:
            said.append(line)
            with pytest.raises(SRError, match="by another process"):
                prepare(two_archives, tmp_path, {}, quiet)

    prepare(two_archives, tmp_path, {}, second)
    assert said


# --- the names -----------------------------------------------------------------------------------------------------


def test_download_by_name(site, two_archives: DataSet, files, tmp_path: Path, monkeypatch, capsys) -> None:
    root, url, _ = site
    sizes = {"Set5": 2, "Set14": 1}
    pictures = {f"benchmark/{n}/HR/{i}.png": files["set/0001.png"] for n, count in sizes.items() for i in range(count)}
    tar_of(root / "benchmark.tar", pictures)
    archive = Archive(f"{url}/benchmark.tar", "benchmark", ".")
    both = DataSet("benchmarks", (archive,), {f"{n}/HR": count for n, count in sizes.items()}, 1e-4, "")
    monkeypatch.setitem(SETS, "df2k", (two_archives, both))
    folders = download("df2k", tmp_path / "data", [root / "train.zip"])
    assert folders == [tmp_path / "data" / "Made", tmp_path / "data" / "benchmarks"]
    assert "2 pictures in" in capsys.readouterr().out
    benchmark = BenchmarkFolder(folders[1] / "Set5")
    benchmark.prepare(2)
    assert benchmark.names == ["0", "1"]
    with pytest.raises(SRError, match=r"no data set 'div3k'; known: div2k"):
        download("div3k", tmp_path)
    with pytest.raises(SRError, match=r"a\.zip is no archive of df2k; .*train\.zip.*benchmark\.tar"):
        download("df2k", tmp_path, [root / "a.zip"])
    with pytest.raises(SRError, match="no file"):
        download("df2k", tmp_path, [tmp_path / "none" / "train.zip"])


def test_records() -> None:
    """What a typo in the table could break without anybody noticing before gigabytes are downloaded."""
    assert sorted(SETS) == ["benchmarks", "df2k", "div2k", "flickr2k", "lsdir"]
    for data in {d.name: d for sets in SETS.values() for d in sets}.values():
        folders = [a.folder for a in data.archives]
        assert data.terms and data.gigabytes > 0
        # Each folder that is counted is filled by some archive.
        assert all(
            any(folder == "." or p == "." or p.split("/")[0] == folder for folder in folders) for p in data.pictures
        )
        for archive in data.archives:
            assert re.fullmatch(r"https://\S+/[\w.-]+\.(zip|tar|tar\.gz)", archive.url)
            assert archive.sha256 is None or re.fullmatch("[0-9a-f]{64}", archive.sha256)
            assert archive.md5 is None or re.fullmatch("[0-9a-f]{32}", archive.md5)
    assert sum(sum(d.pictures.values()) for d in SETS["df2k"]) == 800 + 100 + 2650
    assert [a.name for a in SETS["lsdir"][0].archives][::16] == ["shard-00.tar.gz", "shard-16.tar.gz"]
