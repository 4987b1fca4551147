"""Mistakes in the files that a config names are told in a line."""

from pathlib import Path

import pytest

from sr.errors import SRError

PIPELINE = "class_path: sr.degradations.Pipeline\ninit_args:\n  steps:\n    - class_path: sr.degradations."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "part.yaml: it is empty"),
        ("# nothing\n", "part.yaml: it is empty"),
        ("class_path: [sr", "part.yaml: while parsing a flow sequence in line 1"),
        ("- class_path: sr.degradations.Bicubic", "expected a class_path and its init_args"),
        ("steps: []", "expected a class_path and its init_args"),
        ("sr.degradations.bicubic", "no 'bicubic'; did you mean 'Bicubic'"),
        ("sr-degradations-Bicubic", "not a class path; did you mean 'sr.degradations.Bicubic'"),
        (
            "class_path: degraded.Bicubic",
            "there is no module 'degraded', which class_path degraded.Bicubic names",
        ),
        ("class_path: sr.losses.L1Loss", "sr.losses.L1Loss does not correspond to a subclass of Degradation"),
        ("class_path: sr.degradations.Pipeline", "missing: steps of sr.degradations.Pipeline"),
        (PIPELINE + "JPG", "no 'JPG'; did you mean 'JPEG'"),
        (PIPELINE + "Resize", "missing: modes of sr.degradations.Resize"),
        (
            PIPELINE + "JPEG\n      init_args:\n        qualty_range: [30, 95]",
            "unknown option 'qualty_range' of sr.degradations.JPEG; did you mean 'quality_range'",
        ),
        (
            PIPELINE + "JPEG\n      init_args:\n        quality_range: [low, 95]",
            "quality_range of sr.degradations.JPEG: expected a whole number, not 'low'",
        ),
        (PIPELINE + "JPEG\n      init_args:\n        quality_range: [30, 195]", "quality"),
    ],
)
def test_mistakes_in_the_file_of_a_degradation_are_named(config, start, text, message):
    Path("part.yaml").write_text(text)
    config["data"]["degradation"] = "part.yaml"
    with pytest.raises(SRError, match=f"^data.degradation: .*{message}" if message != "quality" else message) as error:
        start(config)
    assert len(str(error.value).splitlines()) <= 2 and len(str(error.value)) < 400
    assert not Path("runs").exists()


def test_an_empty_list_of_validation_sets_is_no_list(config, start):
    Path("part.yaml").write_text("# to be written\n")
    config["data"]["val"] = "part.yaml"
    with pytest.raises(SRError, match=r"^data.val: part.yaml: it is empty"):
        start(config)
    config["data"]["val"] = None
    assert not start(config).datamodule.val_sets


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [a\n", "line 2: did not find expected ',' or ']'"),
        ("model:\n  a: 1\n b: 2\n", "line 3: did not find expected key"),
        ("model: - a\n", "line 1: block sequence entries are not allowed in this context"),
        ("model: a: b\n", "line 1: mapping values are not allowed in this context"),
    ],
)
def test_a_config_that_is_not_yaml_is_told_by_its_line(config, start, tmp_path, text, message):
    (tmp_path / "broken.yaml").write_text(text)
    with pytest.raises(SRError) as error:
        start(config, "--config", "broken.yaml")
    assert str(error.value) == f"a config is not YAML: {message}"
