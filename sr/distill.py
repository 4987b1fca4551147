"""What a trained network makes of the pictures of a training, for a smaller network to learn from as if it were GT."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sr.atomic import atomic
from sr.checkpoint import load
from sr.data import PictureSet, check_names
from sr.errors import SRError
from sr.image import save_image, to_image
from sr.inference import Upscaler

log = logging.getLogger(__name__)


def distill(
    sets: Sequence[PictureSet], scale: int, teacher: str, folder: Path, done: Callable[[], None] = lambda: None
) -> None:
    """Write ``LQ/SET/NAME.png``, as training would see it, and ``GT/SET/NAME.png``, the teacher's result for it.

    Pictures that are there already, from a call that was broken off, are left as they are. The teacher computes in
    bfloat16, whose noise (half a level of 255 on the average) is far below a teacher's own errors.

    Args:
        sets: prepared for ``scale``.
        scale: GT edge / LQ edge.
        teacher: a weights file, or the name of weights, as :func:`sr.load` takes it.
        folder: gets ``LQ`` and ``GT``, and ``distilled.json``, which says whose pictures these are.
        done: called after each picture.

    Raises:
        SRError: a teacher of another scale, two sets of one name, a folder with another teacher's pictures, or one that
            cannot be written; a picture that cannot be read, unless its set skips these.
    """
    network = load(teacher)
    if network.scale != scale:
        raise SRError(f"the teacher {teacher} enlarges {network.scale} times; this training wants {scale} times")
    check_names(sets, "training sets")  # or they would be written to one folder
    _claim(folder, json.dumps({"teacher": teacher, "scale": scale}) + "\n")
    upscaler = Upscaler(network, dtype=torch.bfloat16)
    for pictures in sets:
        for i, name in enumerate(pictures.names):
            gt, lq = (folder / part / pictures.name / f"{name}.png" for part in ("GT", "LQ"))
            if not gt.is_file():  # which is written last
                try:
                    small, _ = pictures.pair(i)
                except SRError as e:
                    if pictures.on_error == "raise":
                        raise
                    log.warning("left out: %s", e)
                    continue
                for path, picture in ((lq, small), (gt, upscaler(small))):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    save_image(to_image(picture), path)
            done()


def _claim(folder: Path, what: str) -> None:
    """Write whose pictures the folder holds, or make sure that it says the same."""
    file = folder / "distilled.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = file.read_bytes() if file.is_file() else None
    except OSError as e:
        raise SRError(f"cannot use the folder {folder} ({e.strerror}); choose another") from e
    if known is None:
        with atomic(file) as part:
            part.write(what.encode())
    elif known != what.encode():
        raise SRError(f"{folder} holds pictures of another teacher or scale ({file.name}); choose another folder")
