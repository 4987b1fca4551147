"""Which file becomes which, and what is refused before anything is computed."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sr.batch.inputs import Job, Naming, known_suffix, plan, shard
from sr.errors import SRError

NAMING = Naming(lambda: "_x2")


def never() -> str:
    raise AssertionError("names beside the input are not needed")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"planning looks at names only")


def pairs(*args, naming=NAMING, **options):
    return [(str(job.source), str(job.target)) for job in plan(*args, naming, **options)]


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("a.png", "a_x2.png"),
        ("a.JPG", "a_x2.png"),  # lossy: what is written must not lose once more
        ("a.tiff", "a_x2.tiff"),
        ("a.webp", "a_x2.webp"),
        ("v1.2", "v1.2_x2.png"),
        ("noext", "noext_x2.png"),
        ("dir.x/ünï cødé.png", "dir.x/ünï cødé_x2.png"),
    ],
)
def test_a_file_lies_beside_its_input_by_default(folder, name, result):
    make(name)
    assert pairs([name], None) == [(name, result)]


def test_a_picture_suffix_makes_the_output_a_file_of_one_input(folder):
    make("a.jpg", "b.jpg")
    naming = Naming(never)
    assert pairs(["a.jpg"], "c.tif", naming=naming) == [("a.jpg", "c.tif")]
    assert pairs(["a.jpg"], "c", naming=naming) == [("a.jpg", "c/a.png")]
    assert pairs(["a.jpg"], "c.v2/", naming=naming) == [("a.jpg", "c.v2/a.png")]
    assert pairs(["a.jpg", "b.jpg"], "c.tif", naming=naming) == [("a.jpg", "c.tif/a.png"), ("b.jpg", "c.tif/b.png")]
    Path("d.png").mkdir()
    assert pairs(["a.jpg"], "d.png", naming=naming) == [("a.jpg", "d.png/a.png")]


def test_a_folder_is_mirrored(folder):
    make("in/b.png", "in/a.jpg", "in/sub/deep/a.png", "in/notes.txt", "in/.hidden.png", "in/.git/x.png", "in/noext")
    assert pairs(["in"], "out") == [("in/a.jpg", "out/a.png"), ("in/b.png", "out/b.png")]
    tree = [*pairs(["in"], "out"), ("in/sub/deep/a.png", "out/sub/deep/a.png")]
    assert pairs(["in/"], "out", recursive=True) == tree
    assert pairs(["in"], None) == [("in/a.jpg", "in_x2/a.png"), ("in/b.png", "in_x2/b.png")]
    assert pairs(["in"], "out", naming=Naming(never, "-big", ".webp"))[0] == ("in/a.jpg", "out/a-big.webp")


def test_several_folders_keep_their_names(folder):
    make("x/a.png", "y/a.png")
    assert pairs(["x", "y"], "out") == [("x/a.png", "out/x/a.png"), ("y/a.png", "out/y/a.png")]


def test_the_folder_one_is_in(folder, monkeypatch):
    make("in/a.png")
    monkeypatch.chdir("in")
    assert pairs(["."], None) == [("a.png", str(folder / "in_x2" / "a.png"))]


def test_globs_that_the_shell_left(folder):
    make("b.png", "a.png", "sub/c.png", "x[1].png")
    assert pairs(["[ab].png"], "out") == [("a.png", "out/a.png"), ("b.png", "out/b.png")]
    assert pairs(["**/c.png"], "out/") == [("sub/c.png", "out/c.png")]
    assert pairs(["x[1].png"], "out") == [("x[1].png", "out/x[1].png")]  # the file's own name


def test_the_same_file_twice_is_one_input(folder):
    make("a.png", "b.png")
    Path("link.png").symlink_to("a.png")
    assert [source for source, _ in pairs(["b.png", "a.png", "./b.png", "link.png"], "out")] == ["b.png", "a.png"]


def test_results_inside_the_input_folder_are_no_inputs(folder):
    make("in/a.png", "in/out/a.png", "in/out/old.png", "in/sub/b.png")
    found = [("in/a.png", "in/out/a.png"), ("in/sub/b.png", "in/out/sub/b.png")]
    assert pairs(["in"], "in/out", recursive=True) == found


def test_links_between_folders_end(folder):
    make("in/a.png")
    Path("in/loop").symlink_to(Path("in").resolve())
    assert pairs(["in"], "out", recursive=True) == [("in/a.png", "out/a.png")]


@pytest.mark.parametrize("option", ["skip_existing", "overwrite"])
def test_an_earlier_result_beside_its_input_is_no_input(folder, option):
    make("in/a.png", "in/a_x2.png")
    naming = Naming(never, "_x2")
    with pytest.raises(SRError, match=r"in/a_x2.png, an input, would be replaced by the result of in/a.png"):
        plan(["in"], "in", naming)
    assert pairs(["in"], "in", naming=naming, **{option: True}) == [("in/a.png", "in/a_x2.png")]


def test_two_inputs_for_one_output_are_refused(folder):
    make("in/a.png", "in/a.jpg")
    with pytest.raises(SRError, match=r"in/a.jpg and in/a.png would both become out/a.png; rename one, or upscale"):
        plan(["in"], "out", NAMING)
    make("x/a.png")
    Path("alias").symlink_to("in")
    with pytest.raises(SRError, match="would both become"):
        plan(["x/a.png", "in/a.png"], "out", NAMING)


def test_an_input_is_replaced_only_on_demand(folder):
    make("in/a.png", "in/b.jpg")
    for inputs, output in ((["in/a.png"], "in/a.png"), (["in"], "in"), (["in"], "./in/../in")):
        with pytest.raises(SRError, match="is the input as well"):
            plan(inputs, output, NAMING)
        with pytest.raises(SRError, match="is the input as well"):  # else all would be skipped without a word
            plan(inputs, output, NAMING, skip_existing=True)
    assert pairs(["in"], "in", overwrite=True) == [("in/a.png", "in/a.png"), ("in/b.jpg", "in/b.png")]
    os.link("in/a.png", "other.png")
    with pytest.raises(SRError, match="is the input as well"):  # by another name
        plan(["in/a.png"], "other.png", NAMING)


@pytest.mark.parametrize(
    ("inputs", "output", "message"),
    [
        (["gone.png"], None, r"gone.png does not exist in .*; check the path"),
        (["*.gone"], None, r"no file matches \*.gone"),
        (["empty"], None, r"no picture in empty; looked for .*; -r looks in its sub-folders, too"),
        (["a.png"], "file/out", "file is a file, not a folder"),
        (["a.png"], "file", "file is a file, not a folder"),
        (["a.png"], "out.xyz", r"suffix '.xyz'; use one of .*, or end the name of a folder with /"),
        (["a.png"], "gone/out.png", "the folder gone does not exist"),
        (["-", "a.png"], None, "stands alone"),
        (["-"], "empty", "standard input has no name"),
        (["-"], "gone/x.png", "the folder gone does not exist"),
        (["a.png", "b.png"], "-", "only the result of one file"),
        (["a.png"], "sub", "sub/a.png: a folder has this name"),
    ],
)
def test_mistakes_are_named(folder, inputs, output, message):
    make("a.png", "b.png", "file", "sub/a.png/x")
    Path("empty").mkdir()
    with pytest.raises(SRError, match=message) as error:
        plan(inputs, output, NAMING)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(folder):
    make("a.png")
    Path("locked").mkdir(mode=0o500)
    with pytest.raises(SRError, match="no permission to write into locked"):
        plan(["a.png"], "locked/new", NAMING)


def test_other_spellings_of_a_suffix_agree(folder):
    make("a.png")
    naming = Naming(never, None, ".jpg")
    assert pairs(["a.png"], "b.JPEG", naming=naming) == [("a.png", "b.JPEG")]
    with pytest.raises(SRError, match=r"b\.webp says another format than \.jpg"):
        plan(["a.png"], "b.webp", naming)


def test_names_that_the_system_refuses_are_named(folder):
    make("a.png")
    long = "x" * 300
    with pytest.raises(SRError, match=r"cannot use .*File name too long"):
        plan(["a.png"], f"{long}/", NAMING)
    with pytest.raises(SRError, match=r"cannot use .*x\.png \(File name too long\); check the path"):
        plan([f"{long}.png"], None, NAMING)


def test_names_that_differ_in_capitals_are_one_on_a_mac(folder, monkeypatch):
    make("one/IMG.png", "two/img.png", "three/\u00e9.png", "four/e\u0301.png")
    assert len(plan(["one/IMG.png", "two/img.png"], "out", NAMING)) == 2
    monkeypatch.setattr("sys.platform", "darwin")
    for inputs in (["one/IMG.png", "two/img.png"], ["three/\u00e9.png", "four/e\u0301.png"]):
        with pytest.raises(SRError, match="would both become"):
            plan(inputs, "out", NAMING)


def test_streams(folder):
    make("a.jpg")
    assert plan(["-"], None, NAMING) == plan(["-"], "-", NAMING) == [Job(None, None)]
    assert plan(["-"], "out.png", NAMING) == [Job(None, Path("out.png"))]
    assert plan(["a.jpg"], "-", NAMING) == [Job(Path("a.jpg"), None)]


def test_an_animated_gif_stays_one_and_a_still_becomes_png(folder):
    frames = [Image.fromarray(np.full((4, 4), value, np.uint8)) for value in (0, 255)]
    frames[0].save("moving.gif", save_all=True, append_images=frames[1:])
    frames[0].save("still.gif")
    assert pairs(["moving.gif", "still.gif"], "out") == [
        ("moving.gif", "out/moving.gif"),
        ("still.gif", "out/still.png"),
    ]


def test_shards_cover_all_jobs_once(folder):
    make(*(f"in/{i}.png" for i in range(7)))
    jobs = plan(["in"], "out", NAMING)
    parts = [shard(jobs, i, 3) for i in (1, 2, 3)]
    assert [len(part) for part in parts] == [3, 2, 2]
    assert sorted((job for part in parts for job in part), key=jobs.index) == jobs
    for wrong in ((0, 3), (4, 3), (1, 0)):
        with pytest.raises(SRError, match="--shard"):
            shard(jobs, *wrong)


@pytest.mark.parametrize(("text", "suffix"), [("png", ".png"), (".JPG", ".jpg"), ("auto", None)])
def test_formats_by_name(text, suffix):
    assert known_suffix(text) == suffix


def test_an_unknown_format_is_refused():
    with pytest.raises(SRError, match="'xyz'"):
        known_suffix("xyz")
