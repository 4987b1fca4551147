"""Which file becomes which: files, folders and globs to pairs of input and output, checked before any work."""

from __future__ import annotations

import glob
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sr.errors import SRError
from sr.pictures import INPUT_SUFFIXES, OUTPUT_SUFFIXES, format_of, probe

#: The word for standard input as an input, and for standard output as an output.
STREAM = "-"
# Formats whose pictures lose when they are written again, or that hold fewer colours than a result has.
_LOSSY = frozenset({".jpg", ".jpeg", ".jpe", ".jfif", ".avif", ".gif"})
_JUNK = "__MACOSX"  # macOS's zip companion of hidden copies


@dataclass(frozen=True)
class Job:
    """One picture to be upscaled.

    Attributes:
        source: the file; ``None``: standard input.
        target: the file to be written; ``None``: standard output.
    """

    source: Path | None
    target: Path | None


@dataclass(frozen=True)
class Naming:
    """How results are named.

    Attributes:
        mark: gives what is added to the name of a result, or of a folder of results, beside its input (``_x2``).
        suffix: added to every result's name; ``None``: nothing in an output folder, ``mark`` beside the input.
        ext: suffix of the results' format, with its dot; ``None``: the input's, or ``.png`` for a lossy one.
    """

    mark: Callable[[], str]
    suffix: str | None = None
    ext: str | None = None

    def result(self, source: Path, beside: bool = False) -> str:
        """The name of a picture's result."""
        stem = source.stem if source.suffix.lower() in INPUT_SUFFIXES else source.name  # not every dot begins a suffix
        mark = self.suffix if self.suffix is not None else self.mark() if beside else ""
        return f"{stem}{mark}{self.ext or default_suffix(source)}"


def known_suffix(ext: str) -> str | None:
    """``png`` or ``.PNG`` -> ``.png``; ``auto`` -> ``None``.

    Raises:
        SRError: no format that can be written.
    """
    suffix = f".{ext.lower().removeprefix('.')}"
    if suffix == ".auto":
        return None
    if suffix not in OUTPUT_SUFFIXES:
        raise SRError(f"pictures are not written as {ext!r}; use one of {' '.join(sorted(OUTPUT_SUFFIXES))}")
    return suffix


def default_suffix(source: Path) -> str:
    """The suffix of the format that a picture's result gets, by its name: its own, or PNG's where that would lose.

    A GIF stays one if it moves.
    """
    suffix = source.suffix.lower()
    if suffix == ".gif":
        try:
            return suffix if probe(source).frames > 1 else ".png"
        except SRError:  # reported when its turn comes
            return ".png"
    return source.suffix if suffix in OUTPUT_SUFFIXES - _LOSSY else ".png"


def plan(
    inputs: Sequence[str],
    output: str | None,
    naming: Naming,
    *,
    recursive: bool = False,
    skip_existing: bool = False,
    overwrite: bool = False,
) -> list[Job]:
    """Find the pictures and say where each result goes, in a fixed order.

    A file becomes ``output`` if it is the only input and ``output`` has a picture's suffix, and lies under its own name
    in the folder ``output`` otherwise. A folder's pictures lie in ``output`` as they lie in the folder, under the
    folder's own name if there are other inputs. Without ``output``, results lie beside their inputs.

    Args:
        inputs: files, folders, globs that the shell did not expand, or ``-`` alone.
        output: file or folder, ``-`` for standard output, or ``None``.
        naming: names of the results.
        recursive: sub-folders as well.
        skip_existing: results that exist stay; what is the result of another input is then no input itself.
        overwrite: an input may be replaced by its own result; a result of another input is then no input itself.

    Raises:
        SRError: something is missing or unreadable, there is no picture, two inputs would become one file, an input
            would be replaced, the output's name says another format than ``naming``, or it cannot be written.
    """
    try:
        return _plan(inputs, output, naming, recursive, skip_existing, overwrite)
    except OSError as e:  # no permission for a folder on the way, or a name that is too long
        raise SRError(f"cannot use {e.filename or output} ({e.strerror or e}); check the path") from e


def _plan(
    inputs: Sequence[str], output: str | None, naming: Naming, recursive: bool, skip_existing: bool, overwrite: bool
) -> list[Job]:
    if STREAM in inputs:
        if len(inputs) > 1:
            raise SRError(f"standard input ({STREAM}) stands alone; leave the other inputs out")
        return [Job(None, _stream_target(output))]
    found = _unique(_expand(inputs))
    if output == STREAM:
        if len(found) != 1 or found[0].is_dir():
            raise SRError("only the result of one file can go to standard output; give a folder with -o")
        return [Job(found[0], None)]
    jobs: list[Job] = []
    if output is not None and len(found) == 1 and found[0].is_file() and _means_file(output):
        if not Path(output).parent.is_dir():
            raise SRError(f"cannot write {output}: the folder {Path(output).parent} does not exist; create it")
        if naming.ext is not None and format_of(naming.ext) != format_of(Path(output).suffix):
            raise SRError(f"{output} says another format than {naming.ext}; leave --ext out, or change the name")
        jobs.append(Job(found[0], Path(output)))
    else:
        for path in found:
            jobs += _jobs(path, output, naming, recursive=recursive, alone=len(found) == 1)
    return _checked(jobs, skip_existing=skip_existing, overwrite=overwrite)


def _stream_target(output: str | None) -> Path | None:
    if output is None or output == STREAM:
        return None
    if not _means_file(output):
        raise SRError(f"{output} is a folder, and standard input has no name; give a file with -o")
    if not Path(output).parent.is_dir():
        raise SRError(f"cannot write {output}: the folder {Path(output).parent} does not exist; create it")
    return Path(output)


def _means_file(output: str) -> bool:
    """Whether the output for one file is a file rather than a folder."""
    path = Path(output)
    if path.is_dir() or output.endswith(("/", os.sep)) or not path.suffix:
        return False
    if path.suffix.lower() not in OUTPUT_SUFFIXES:
        known = " ".join(sorted(OUTPUT_SUFFIXES))
        raise SRError(
            f"{output}: pictures are not written with the suffix {path.suffix!r}; use one of {known}, "
            "or end the name of a folder with /"
        )
    return True


def _expand(inputs: Sequence[str]) -> Iterator[Path]:
    for text in inputs:
        if Path(text).exists():
            yield Path(text)
        elif glob.has_magic(text):
            matches = sorted(glob.glob(text, recursive=True))  # noqa: PTH207  (Path has none for absolute ones)
            if not matches:
                raise SRError(f"no file matches {text}; check the path")
            yield from map(Path, matches)
        else:
            where = "" if Path(text).is_absolute() else f" in {Path.cwd()}"
            raise SRError(f"{text} does not exist{where}; check the path")


def _unique(paths: Iterator[Path]) -> list[Path]:
    """Without repetitions of the same file."""
    found: dict[object, Path] = {}
    for path in paths:
        found.setdefault(_identity(path) or path, path)  # a link to nothing is reported when its turn comes
    return list(found.values())


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells whether two paths are one file, through links and on any file system; ``None``: there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _jobs(path: Path, output: str | None, naming: Naming, *, recursive: bool, alone: bool) -> list[Job]:
    """The jobs of one file or folder."""
    if not path.is_dir():
        if output is None:
            return [Job(path, path.with_name(naming.result(path, beside=True)))]
        return [Job(path, Path(output) / naming.result(path))]
    real = path.resolve() if path.name in ("", "..") else path  # "." has no name
    if output is None:
        target = real.with_name(f"{real.name}{naming.mark()}")
    else:
        target = Path(output) if alone else Path(output) / real.name
    pictures = list(_pictures(path, recursive, None if output is None else Path(output)))
    if not pictures:
        more = "" if recursive else "; -r looks in its sub-folders, too"
        raise SRError(f"no picture in {path}; looked for {' '.join(sorted(INPUT_SUFFIXES))}{more}")
    return [Job(p, target / p.relative_to(path).with_name(naming.result(p))) for p in pictures]


def _pictures(root: Path, recursive: bool, output: Path | None) -> Iterator[Path]:
    """The pictures of a folder, sorted, without hidden ones; then those of its sub-folders, but for ``output``."""

    def fail(error: OSError) -> None:
        raise SRError(f"the folder {error.filename} cannot be read ({error.strerror})") from error

    # By their real paths: a link to a parent would never end, and what lies in the output is no input.
    seen = {root.resolve()} | (set() if output is None else {output.resolve()})
    for folder, folders, files in os.walk(root, onerror=fail, followlinks=True):
        here = Path(folder)
        for name in sorted(files):
            if not name.startswith(".") and Path(name).suffix.lower() in INPUT_SUFFIXES:
                yield here / name
        keep = []
        for name in sorted(folders) if recursive else ():
            real = (here / name).resolve()
            if not name.startswith(".") and name != _JUNK and real not in seen:
                seen.add(real)
                keep.append(name)
        folders[:] = keep


def _checked(jobs: list[Job], *, skip_existing: bool, overwrite: bool) -> list[Job]:
    """The jobs without those whose input is another one's result; no two write one file, no input is lost."""
    resolve: Callable[[Path], Path] = lru_cache(maxsize=None)(Path.resolve)
    sources = {_identity(job.source): job.source for job in jobs if job.source is not None}
    sources.pop(None, None)
    taken: dict[str, Job] = {}
    results = set()
    for job in jobs:
        assert job.source is not None and job.target is not None  # streams have no plan
        key = os.path.normcase(resolve(job.target.parent) / job.target.name)
        if sys.platform == "darwin":  # whose file system knows neither capitals nor ways to write an accent apart
            key = unicodedata.normalize("NFC", key).casefold()
        if key in taken:
            raise SRError(
                f"{taken[key].source} and {job.source} would both become {job.target}; rename one, or "
                "upscale them into different folders"
            )
        taken[key] = job
        if job.target.is_dir():
            raise SRError(f"cannot write {job.target}: a folder has this name; choose another with -o or --suffix")
        there = _identity(job.target)
        if there not in sources:
            continue
        if there == _identity(job.source):
            if not overwrite:
                raise SRError(
                    f"{job.target} is the input as well, and would be replaced; "
                    "choose another -o or --suffix, or allow it with --overwrite"
                )
        elif skip_existing or overwrite:
            results.add(there)
        else:
            raise SRError(
                f"{job.target}, an input, would be replaced by the result of {job.source}; choose another -o, or, if "
                "it is an earlier result, keep it with --skip-existing or replace it with --overwrite"
            )
    kept = [job for job in jobs if job.source is not None and _identity(job.source) not in results]
    for folder in {job.target.parent for job in kept if job.target is not None}:
        _check_folder(folder)
    return kept


def _check_folder(folder: Path) -> None:
    """That files can be written in a folder, which need not exist yet."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists() or p.is_symlink())
    if not there.is_dir():
        raise SRError(f"cannot write into {folder}: {there} is a file, not a folder; choose another -o")
    if not os.access(there, os.W_OK | os.X_OK):
        raise SRError(f"no permission to write into {there}; choose another -o")


def shard(jobs: Sequence[Job], index: int, count: int) -> list[Job]:
    """Every ``count``-th job, from the ``index``-th (counted from 1), so that ``count`` processes share the work.

    Raises:
        SRError: no such part.
    """
    if not 1 <= index <= count:
        raise SRError(f"--shard is 1/{count} to {count}/{count} for {count} parts, not {index}/{count}")
    return list(jobs[index - 1 :: count])
