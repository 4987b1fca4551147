"""Public data sets: where they come from, on what terms, and getting them whole onto the disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from sr.data.archives import ArchiveError, unpack
from sr.errors import SRError
from sr.fetch import FetchError, check_file, fetch, gigabytes, need_space
from sr.image import list_images

Say = Callable[[str], object]


@dataclass(frozen=True)
class Archive:
    """A file to download and the pictures in it.

    Attributes:
        url: its address.
        inside: the folder in the archive that holds the pictures; ``.``: all of it.
        folder: where in the data set they go; ``.``: they are the data set. Archives with the same ``folder`` are
            sources of the same pictures, tried in turn.
        size: in bytes; ``None`` where nobody has published it.
        sha256: hexadecimal digest, likewise.
        md5: hexadecimal digest, likewise.
    """

    url: str
    inside: str
    folder: str
    size: int | None = None
    sha256: str | None = None
    md5: str | None = None

    @property
    def name(self) -> str:
        """The file's name."""
        return urlsplit(self.url).path.rpartition("/")[2]


@dataclass(frozen=True)
class DataSet:
    """Record of one data set.

    Attributes:
        name: of its folder.
        archives: what it is made of.
        pictures: folder in the data set -> number of pictures below it.
        gigabytes: disk space that the pictures take, roughly.
        terms: what its authors ask of those who use it, in a sentence.
        by_hand: how to get the archives where that needs an account; empty where it needs none.
    """

    name: str
    archives: tuple[Archive, ...]
    pictures: Mapping[str, int]
    gigabytes: float
    terms: str
    by_hand: str = ""


_DIV2K_TRAIN = Archive(
    "https://data.vision.ee.ethz.ch/cvl/DIV2K/DIV2K_train_HR.zip",
    inside="DIV2K_train_HR",
    folder="DIV2K_train_HR",
    # Size and digest of both: tensorflow/datasets, url_checksums/div2k.txt.
    size=3530603713,
    sha256="9d0b9c463f6e35b6c62cc6a930ee2224f670b34c1df841a57670f9acf0f6c335",
)
_DIV2K_VALID = Archive(
    "https://data.vision.ee.ethz.ch/cvl/DIV2K/DIV2K_valid_HR.zip",
    inside="DIV2K_valid_HR",
    folder="DIV2K_valid_HR",
    size=448993893,
    sha256="20dd31fd84d777bc1cf5d6b7654a3f569c0aec74458ae094122ad1d0489900fc",
)
_MIRROR = "https://huggingface.co/datasets/eugenesiow/Div2k/resolve/main/data"

DIV2K = DataSet(
    "DIV2K",
    archives=(
        _DIV2K_TRAIN,
        replace(_DIV2K_TRAIN, url=f"{_MIRROR}/DIV2K_train_HR.zip"),
        _DIV2K_VALID,
        replace(_DIV2K_VALID, url=f"{_MIRROR}/DIV2K_valid_HR.zip"),
    ),
    pictures={"DIV2K_train_HR": 800, "DIV2K_valid_HR": 100},
    gigabytes=4.0,
    terms="DIV2K is for academic research only; the pictures belong to their owners.",
)
FLICKR2K = DataSet(
    "Flickr2K",
    archives=(
        # No size or digest of the zip file (high resolution only, 11.6 GB) is published.
        Archive(
            "https://huggingface.co/datasets/yangtao9009/Flickr2K/resolve/main/Flickr2K.zip",
            inside="Flickr2K",
            folder="Flickr2K_HR",
        ),
        # The authors' own, with the low-resolution pictures, which stay in it. Digest: torchSR, datasets/flickr2k.py.
        Archive(
            "https://cv.snu.ac.kr/research/EDSR/Flickr2K.tar",
            inside="Flickr2K/Flickr2K_HR",
            folder="Flickr2K_HR",
            md5="5d3f39443d5e9489bff8963f8f26cb03",
        ),
    ),
    pictures={"Flickr2K_HR": 2650},
    gigabytes=11.6,
    terms="Flickr2K comes without a licence, for research; the pictures belong to their authors.",
)
LSDIR = DataSet(
    "LSDIR",
    archives=tuple(
        Archive(f"https://huggingface.co/ofsoundof/LSDIR/resolve/main/shard-{i:02}.tar.gz", ".", f"shard-{i:02}")
        for i in range(17)
    ),
    pictures={".": 84991},
    gigabytes=155.0,
    terms="LSDIR is for academic research only, on the terms that its authors show before the download.",
    by_hand="accept the terms at https://huggingface.co/ofsoundof/LSDIR, then run hf auth login "
    "and hf download ofsoundof/LSDIR --include 'shard-*.tar.gz' --local-dir FOLDER",
)
BENCHMARKS = DataSet(
    "benchmarks",
    archives=(
        # Digests: torchSR, datasets/benchmarks.py (md5); the sisr project, tests/utils/test_imresize.py (sha256, size).
        Archive(
            "https://cv.snu.ac.kr/research/EDSR/benchmark.tar",
            inside="benchmark",
            folder=".",
            size=250112000,
            sha256="80c21c333bbf6ceb5308b7243761f8284478274413a97b96f1d63e9045fd93e8",
            md5="4ace41d33c2384b97e6b320cd0afd6ba",
        ),
    ),
    pictures={"Set5/HR": 5, "Set14/HR": 14, "B100/HR": 100, "Urban100/HR": 100},
    gigabytes=0.25,
    terms="Set5, Set14, B100 and Urban100 come without a licence, for research; the pictures belong to their owners.",
)

#: What :func:`download` knows, by name.
SETS: dict[str, tuple[DataSet, ...]] = {
    "div2k": (DIV2K,),
    "flickr2k": (FLICKR2K,),
    "df2k": (DIV2K, FLICKR2K),
    "lsdir": (LSDIR,),
    "benchmarks": (BENCHMARKS,),
}


def download(name: str, to: str | Path, archives: Iterable[str | Path] = (), say: Say = print) -> list[Path]:
    """Get a public data set: download its archives, check them, unpack their pictures and count these.

    A data set appears under its name once it is whole. Until then its parts are in a hidden folder beside it, from
    which a later call goes on; one after success does nothing. The layouts are those of :class:`sr.data.GTFolder`
    (``DIV2K/DIV2K_train_HR``, ``DIV2K/DIV2K_valid_HR``, ``Flickr2K/Flickr2K_HR``, ``LSDIR``) and
    :class:`sr.data.BenchmarkFolder` (``benchmarks/Set5`` and the others).

    Args:
        name: one of :data:`SETS`.
        to: the folder that the data sets' folders go into; made if missing.
        archives: files that are here already, recognised by their names, so as not to be downloaded; they are kept.
        say: called with each line of news.

    Returns:
        The data sets' folders.

    Raises:
        SRError: unknown name or archive; a download or check failed; no space; the data set's folder holds something
            else.
    """
    if name not in SETS:
        raise SRError(f"there is no data set {name!r}; known: {', '.join(SETS)}")
    known = list(dict.fromkeys(a.name for data in SETS[name] for a in data.archives))
    given = {Path(a).name: Path(a) for a in archives}
    for file, path in given.items():
        if file not in known:
            raise SRError(f"{path} is no archive of {name}; it is made of {_some(known)}")
        if not path.is_file():
            raise SRError(f"there is no file {path}; check the path")
        if not path.is_file():
            raise SRError(f"there is no file {path}; check the path")
    return [prepare(data, Path(to), given, say) for data in SETS[name]]


def prepare(data: DataSet, to: Path, given: Mapping[str, Path], say: Say = print) -> Path:
    """Get one data set; see :func:`download`.

    Args:
        data: its record.
        to: the folder that its folder goes into.
        given: archives that are here already, by file name.
        say: called with each line of news.

    Returns:
        The data set's folder, ``to / data.name``.

    Raises:
        SRError: as for :func:`download`.
    """
    final, work = to / data.name, to / f".{data.name}.partial"
    if final.exists():
        if wrong := _miscounted(data, final):
            raise SRError(f"{final} is there, but holds {wrong}; move it away to have it prepared anew")
        say(f"{data.name} is complete already, in {final}")
    else:
        try:
            work.mkdir(parents=True, exist_ok=True)
            with FileLock(work / "lock", timeout=0):
                _assemble(data, work, given, say)
                (work / "pictures").replace(final)
        except Timeout as e:
            raise SRError(f"{data.name} is being prepared in {to} by another process; wait for it to end") from e
        except OSError as e:
            raise SRError(f"{data.name} cannot be prepared in {to} ({e.strerror or e})") from e
        say(f"{data.name} is complete: " + ", ".join(f"{n} pictures in {final / f}" for f, n in data.pictures.items()))
    shutil.rmtree(work, ignore_errors=True)
    return final


def _assemble(data: DataSet, work: Path, given: Mapping[str, Path], say: Say) -> None:
    """Fill ``work / "pictures"`` with the whole data set."""
    sources: dict[str, list[Archive]] = {}  # for the folders that are still to be filled
    for archive in data.archives:
        if not (work / "pictures" / archive.folder).exists():
            sources.setdefault(archive.folder, []).append(archive)
    missing = [s[0].name for s in sources.values() if not any(a.name in given for a in s)]
    if missing and data.by_hand:
        raise SRError(f"{data.name}: {data.by_hand};\nthen give what is missing with --from: {_some(missing)}")
    space = data.gigabytes * 1e9 * (2 if missing else 1)  # an archive goes once it is unpacked
    there = sum(f.stat().st_size for f in work.rglob("*") if f.is_file())
    say(
        f"{data.terms}\n{data.name} takes up to {gigabytes(space)} while it is prepared, {data.gigabytes} GB afterwards"
    )
    need_space(work, space - there)
    for folder, archives in sources.items():
        _fill(work / "pictures" / folder, archives, work, given, say)
    if wrong := _miscounted(data, work / "pictures"):
        shutil.rmtree(work / "pictures")
        raise SRError(f"the archives of {data.name} held {wrong}; get them again")


def _fill(target: Path, archives: Sequence[Archive], work: Path, given: Mapping[str, Path], say: Say) -> None:
    """Make one folder of the data set from the first of its archives that is to be had."""
    for archive in archives:
        if path := given.get(archive.name):
            say(f"checking and unpacking {path}")
            check_file(path, size=archive.size, sha256=archive.sha256, md5=archive.md5)
            return unpack(path, archive.inside, target)
    archive, path = _fetch_any(archives, work, say)
    say(f"unpacking {path.name}")
    try:
        unpack(path, archive.inside, target)
    except ArchiveError:
        path.unlink()  # or the next call would find it again
        raise
    path.unlink()


def _fetch_any(archives: Sequence[Archive], work: Path, say: Say) -> tuple[Archive, Path]:
    failure = ""
    for archive in archives:
        if failure:
            say(failure)
        say(f"downloading {archive.url}")
        path = work / archive.name
        try:
            return archive, fetch(archive.url, path, size=archive.size, sha256=archive.sha256, md5=archive.md5)
        except FetchError as e:
            failure = str(e)
    names = _some(list(dict.fromkeys(a.name for a in archives)))
    raise FetchError(f"{failure};\ntry again later, or give {names} from elsewhere with --from")


def _miscounted(data: DataSet, root: Path) -> str:
    """The folders that hold another number of pictures than the record says; empty if none does."""
    wrong = []
    for folder, expected in data.pictures.items():
        try:
            found = len(list_images(root / folder))
        except SRError:  # no such folder, or nothing in it
            found = 0
        if found != expected:
            wrong.append(f"{found} instead of {expected} pictures in {folder}")
    return ", ".join(wrong)


def _some(names: Sequence[str]) -> str:
    """All names, or the first and the last of many."""
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} ... {names[-1]} ({len(names)} files)"
