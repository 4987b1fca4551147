"""Example pictures with bicubic beside a network: ``python scripts/gallery.py -m sparsesr_s_x2.photos --output out``.

Writes a strip LR | bicubic | network | HR of each photograph, with the PSNR under each, and sheets of four kinds of
pictures that nobody has a larger version of: a photograph as it is, a drawing, a screenshot and a scan. The last three
are made here.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

import sr
from sr.data import find_pictures
from sr.errors import run_script
from sr.evaluation import PictureWriter, evaluate, open_models
from sr.image import open_image, save_image
from sr.metrics import PROTOCOLS

_TEXT = (
    "Windowed attention compares a patch with its neighbours and keeps the few that look alike. "
    "Small type such as 0 O 8 B 1 l I, thin rules and sharp corners are what enlarging spoils first."
)
_SIZE = (240, 180)
_PAPER, _INK, _BLUE, _RED = "#f7f4ec", "#22262b", "#2d6cdf", "#d8432f"


def drawing() -> Image.Image:
    """Flat colours, outlines, hatching and curves, with smooth edges."""
    picture = Image.new("RGB", (4 * _SIZE[0], 4 * _SIZE[1]), "#fffdf5")
    draw = ImageDraw.Draw(picture)
    draw.ellipse((80, 72, 480, 472), fill="#ffd35c", outline=_INK, width=10)
    draw.polygon([(440, 600), (680, 160), (912, 600)], fill="#7fc8a9", outline=_INK, width=5)
    for x in range(0, 180, 12):
        draw.line((512 + x, 592, 600 + x, 416), fill=_INK, width=4)
    for i in range(6):
        draw.arc((96 + 36 * i, 400 + 24 * i, 840 - 36 * i, 704 - 24 * i), 20, 160, fill=_BLUE, width=7)
    draw.line((24, 680, 936, 48), fill=_RED, width=5)
    draw.rectangle((32, 32, 924, 684), outline=_INK, width=4)
    return picture.resize(_SIZE, Image.Resampling.BOX)


def _lines(draw: ImageDraw.ImageDraw, top: int, size: int, fill: str, width: int, left: int = 10) -> int:
    font, line = ImageFont.load_default(size), ""
    for word in [*_TEXT.split(), ""]:
        if not word or draw.textlength(f"{line} {word}", font) > width:
            draw.text((left, top), line, font=font, fill=fill)
            top, line = top + size + 3, word
        else:
            line = f"{line} {word}".strip()
    return top


def screenshot() -> Image.Image:
    """A window with text in three sizes, a button and a list."""
    picture = Image.new("RGB", _SIZE, "white")
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0, _SIZE[0], 17), fill="#2b303b")
    for i, colour in enumerate((_RED, "#e8b339", "#58a55c")):
        draw.ellipse((6 + 14 * i, 5, 13 + 14 * i, 12), fill=colour)
    draw.text((90, 2), "settings.yaml", font=ImageFont.load_default(11), fill="#d9dde3")
    top = _lines(draw, 24, 9, _INK, 220)
    top = _lines(draw, top + 4, 12, "#555b66", 150)
    draw.rounded_rectangle((176, 140, 230, 160), 4, fill=_BLUE)
    draw.text((188, 143), "Apply", font=ImageFont.load_default(11), fill="white")
    return picture


def scan() -> Image.Image:
    """A printed page, a little askew, with paper grain, blur and JPEG's traces."""
    page = Image.new("RGB", (2 * _SIZE[0], 2 * _SIZE[1]), _PAPER)
    draw = ImageDraw.Draw(page)
    top = _lines(draw, 40, 22, _INK, 420, left=30)
    draw.line((30, top + 8, 450, top + 8), fill=_INK, width=2)
    draw.rectangle((30, top + 24, 200, top + 90), outline=_INK, width=2)
    page = page.rotate(1.3, Image.Resampling.BICUBIC, fillcolor=_PAPER).filter(ImageFilter.GaussianBlur(1.4))
    small = np.asarray(page.resize(_SIZE, Image.Resampling.BOX), dtype=np.float32)
    grain = np.random.default_rng(0).normal(0, 3, small.shape[:2])[..., None]
    return Image.fromarray((small + grain).clip(0, 255).astype(np.uint8))


def sheet(picture: Image.Image, upscaler: sr.Upscaler) -> Image.Image:
    """Bicubic above the network's result."""
    large = upscaler(picture)
    bicubic = picture.resize(large.size, Image.Resampling.BICUBIC)
    both = Image.new("RGB", (large.width, 2 * large.height + 6), "white")
    both.paste(bicubic, (0, 0))
    both.paste(large, (0, large.height + 6))
    return both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, help="weights, or their name")
    parser.add_argument("--output", type=Path, required=True, help="folder for the pictures")
    parser.add_argument("--photographs", type=Path, default=Path("datasets/sample/val"))
    parser.add_argument("--photograph", default="friends", help="whose sheet is made (default: friends)")
    parser.add_argument("--crop", type=int, nargs=4, default=(0, 0, *_SIZE), metavar=("X", "Y", "W", "H"))
    args = parser.parse_args()

    path = next(args.photographs.glob(f"{args.photograph}.*"), None)
    if path is None:
        raise sr.SRError(f"no picture {args.photograph} in {args.photographs}; name one with --photograph")
    whole = open_image(path).convert("RGB")
    upscaler = sr.Upscaler(sr.load(args.model))
    (model,) = open_models([args.model], [])
    args.output.mkdir(parents=True, exist_ok=True)
    pictures = find_pictures(args.photographs, upscaler.scale)
    writer = PictureWriter(args.output / "strips", pictures.name, upscaler.scale, tuple(args.crop))
    for result in evaluate([model], pictures, [PROTOCOLS["sisr-y"]], on_picture=writer):
        print(result.name, *(f"{name} {s[0].psnr:.2f} dB" for name, s in result.scores.items()))
    x, y, w, h = args.crop
    kinds = {"photograph": whole.crop((x, y, x + w, y + h)), "drawing": drawing(), "screenshot": screenshot()}
    for name, picture in (kinds | {"scan": scan()}).items():
        save_image(sheet(picture, upscaler), args.output / f"{name}.png")
        print(args.output / f"{name}.png")


if __name__ == "__main__":
    run_script(main)
