"""Pictures of every kind that upscaling meets, with what their results must be.

The files are made by Pillow or byte by byte, never by ``sr``; what is to be expected of a result follows from how the
picture was made: four quarters of one colour each.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms, PngImagePlugin, features
from raw_files import display_p3, png, png_chunk, tiff

#: Upper left, upper right, lower left, lower right.
QUARTERS = np.array([[200, 30, 40, 255], [20, 180, 60, 255], [40, 60, 210, 255], [250, 240, 30, 255]], np.uint8)
GREYS = np.array([20, 90, 160, 250], np.uint8)
WIDTH, HEIGHT = 24, 16
XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="%d" dc:title="Torture"/></x:xmpmeta>'


@dataclass
class Case:
    """A file and its result.

    Attributes:
        name: of the file.
        format: Pillow's name of the real format.
        width: pixels of the upright picture.
        height: likewise.
        channels: of the result: 1 grey, 2 grey and alpha, 3 RGB, 4 RGBA.
        dtype: of the result's samples: uint8, uint16, or that of a deeper TIFF file.
        suffix: of a result whose format the user leaves open.
        corners: colour of the four corners of the (first) frame, each with ``channels`` numbers in [0, 1] of the
            result's range; under full transparency the colour is free (NaN). ``None``: no quarters.
        mean: of all pixels and each channel; colours are weighted with alpha.
        tolerance: of corners and means, for files with loss.
        frames: of the result.
        durations: in ms, of each frame.
        loop: how often it plays; 0 is for ever.
        dpi, make, icc, xmp, text: what the result must have: resolution, EXIF camera maker, profile, XMP title, text.
    """

    name: str
    format: str
    width: int = WIDTH
    height: int = HEIGHT
    channels: int = 3
    dtype: str = "uint8"
    suffix: str = ".png"
    corners: np.ndarray | None = None
    mean: np.ndarray | None = None
    tolerance: float = 0.008
    frames: int = 1
    durations: list[float] = field(default_factory=list)
    loop: int = 0
    dpi: tuple[float, float] | None = None
    make: str | None = None
    icc: bytes | None = None
    xmp: bool = False
    text: dict[str, str] = field(default_factory=dict)


def quarters(colours: np.ndarray, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """(H, W, C) of four colours (4, C)."""
    row, column = np.arange(height) * 2 // height, np.arange(width) * 2 // width
    return colours[row[:, None] * 2 + column[None]]


def exif(turn: int, make: str = "Maker") -> Image.Exif:
    block = Image.Exif()
    block[0x0112], block[0x010F] = turn, make
    block.get_ifd(0x8769)[0x9003] = "2001:02:03 04:05:06"
    loaded = Image.Exif()  # of which Pillow writes the inner directories into TIFF as well
    loaded.load(block.tobytes())
    return loaded


#: Transposition by which an upright picture is stored so that this orientation undoes it.
STORED = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}


def turned(image: Image.Image, turn: int) -> Image.Image:
    return image.transpose(Image.Transpose(STORED[turn])) if turn > 1 else image


def _expected(colours: np.ndarray, top: float = 255) -> dict[str, Any]:
    """Corners and mean of four equal quarters (4, C); C of 2 or 4 has alpha, which colours are weighted with."""
    corners = colours.astype(np.float64) / top
    mean = corners.mean(0)
    if colours.shape[1] in (2, 4):
        weight = corners[:, -1:]
        mean[:-1] = (corners[:, :-1] * weight).sum(0) / weight.sum()
        corners[corners[:, -1] == 0, :-1] = np.nan
    return {"corners": corners, "mean": mean, "channels": colours.shape[1]}


def make(folder: Path) -> list[Case]:
    """Write all files into ``folder``, which exists."""
    cases: list[Case] = []

    def put(name: str, kind: str, content: Image.Image | bytes, expected: dict[str, Any], **save: Any) -> None:
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            content.copy().save(folder / name, kind, **save)  # Pillow leaves its settings on the picture
        cases.append(Case(name, kind, **expected))

    rgb, rgba = QUARTERS[:, :3], QUARTERS.copy()
    rgba[:, 3] = [255, 0, 128, 255]
    grey = GREYS[:, None]
    la = np.stack([GREYS, np.array([0, 255, 128, 255], np.uint8)], 1)
    colour, plain = Image.fromarray(quarters(rgb)), Image.fromarray(quarters(grey)[..., 0])
    lossy = {"tolerance": 0.03}
    jpeg = {"suffix": ".jpg", **lossy}
    best = {"quality": 95, "subsampling": 0}

    put("rgb.png", "PNG", colour, {**_expected(rgb), "dpi": (300, 300)}, dpi=(300, 300))
    put("grey.png", "PNG", plain, _expected(grey))
    put("la.png", "PNG", Image.fromarray(quarters(la)), _expected(la))
    put("rgba.png", "PNG", Image.fromarray(quarters(rgba)), _expected(rgba))
    put("pa.png", "PNG", Image.fromarray(quarters(rgba)).quantize(8), {**_expected(rgba), **lossy})
    put("palette.png", "PNG", colour.quantize(4), _expected(rgb))
    put("palette.tif", "TIFF", colour.quantize(4), {**_expected(rgb), "suffix": ".tif"})
    clear = colour.quantize(4)
    hidden = rgba.copy()
    hidden[:, 3] = [255, 255, 255, 0]
    put("palette_clear.png", "PNG", clear, _expected(hidden), transparency=int(np.asarray(clear)[-1, -1]))
    bits = np.array([[0], [255], [255], [0]], np.uint8)
    put("one_bit.png", "PNG", Image.fromarray(quarters(bits)[..., 0] > 0), _expected(bits))
    put("one_bit.tif", "TIFF", Image.fromarray(quarters(bits)[..., 0] > 0), {**_expected(bits), "suffix": ".tif"})
    two = np.array([[0], [1], [2], [3]], np.uint8)
    two_clear = np.array([[0, 255], [85, 255], [170, 0], [255, 255]], np.uint8)
    put("grey2_clear.png", "PNG", png(quarters(two), 2, png_chunk(b"tRNS", b"\0\2")), _expected(two_clear))
    key = png_chunk(b"tRNS", struct.pack(">3H", *QUARTERS[3, :3].tolist()))
    put("rgb_clear.png", "PNG", png(quarters(rgb), 8, key), _expected(hidden))
    put("interlaced.png", "PNG", png(quarters(rgb), 8, interlaced=True), _expected(rgb))

    deep = {"dtype": "uint16"}
    values = {1: grey, 2: la, 3: rgb, 4: rgba}
    for channels, small in values.items():
        wide = small.astype(np.uint16) * 257 - np.uint16(77) * ((small > 0) & (small < 255))
        content, expected = quarters(wide), {**_expected(wide, 65535), **deep}
        put(f"deep{channels}.png", "PNG", png(content, 16), expected)
        put(f"deep{channels}.tif", "TIFF", tiff(content), {**expected, "suffix": ".tif"})
    dark = np.array([[0, 1, 2], [3, 100, 200], [255, 254, 20], [17, 18, 19]], np.uint16)
    put("deep_dark.png", "PNG", png(quarters(dark), 16), {**_expected(dark, 65535), **deep})  # fits in 8 bits
    wide = rgb.astype(np.uint16) * 257
    put("deep_interlaced.png", "PNG", png(quarters(wide), 16, interlaced=True), {**_expected(wide, 65535), **deep})
    key = png_chunk(b"tRNS", struct.pack(">3H", *wide[3].tolist()))
    deep_hidden = hidden.astype(np.uint16) * 257
    put("deep_clear.png", "PNG", png(quarters(wide), 16, key), {**_expected(deep_hidden, 65535), **deep})
    wide = grey.astype(np.uint16) * 257
    expected = {**_expected(wide, 65535), **deep, "suffix": ".tif"}
    put("i16.tif", "TIFF", Image.fromarray(quarters(wide)[..., 0]), expected)
    put("i16b.tif", "TIFF", tiff(quarters(wide), ">"), expected)
    put("white_is_zero.tif", "TIFF", tiff(quarters(65535 - wide), tags={262: (3, [0])}), expected)
    put(
        "grey16.pgm",
        "PPM",
        b"P5\n%d %d\n65535\n" % (WIDTH, HEIGHT) + quarters(wide).astype(">u2").tobytes(),
        {**expected, "suffix": ".pgm"},
    )
    whole = grey.astype(np.int32) * 400_000
    expected = {**_expected(whole, 1e8), "dtype": "int32", "suffix": ".tif"}
    put("i.tif", "TIFF", Image.fromarray(quarters(whole)[..., 0]), expected)
    real = grey.astype(np.float32) / 255
    expected = {**_expected(real, 1), "dtype": "float32", "suffix": ".tif"}
    put("float.tif", "TIFF", Image.fromarray(quarters(real)[..., 0]), expected)
    expected = {**_expected(rgb.astype(np.float32) * 4, 1000), "dtype": "float32", "suffix": ".tif"}
    put("float_rgb.tif", "TIFF", tiff(quarters(rgb.astype(np.float32) * 4)), expected)

    for turn in range(1, 9):
        put(
            f"exif{turn}.jpg",
            "JPEG",
            turned(colour, turn),
            {**_expected(rgb), **jpeg, "make": "Maker"},
            exif=exif(turn),
            **best,
        )
    wide = rgb.astype(np.uint16) * 257
    for turn in (3, 6):
        stored = np.asarray(turned(colour, turn)).astype(np.uint16) * 257
        block = png_chunk(b"eXIf", exif(turn).tobytes()[6:])
        put(f"deep_exif{turn}.png", "PNG", png(stored, 16, block), {**_expected(wide, 65535), **deep, "make": "Maker"})
    stored = np.asarray(turned(colour, 8)).astype(np.uint16) * 257
    expected = {**_expected(wide, 65535), **deep, "suffix": ".tif"}
    put("deep_exif8.tif", "TIFF", tiff(stored, tags={274: (3, [8])}), expected)
    put(
        "exif5.webp",
        "WEBP",
        turned(colour, 5),
        {**_expected(rgb), "suffix": ".webp", "make": "Maker"},
        exif=exif(5),
        lossless=True,
    )
    put("exif7.tif", "TIFF", turned(colour, 7), {**_expected(rgb), "suffix": ".tif", "make": "Maker"}, exif=exif(7))

    inks = np.stack([255 - rgb[:, 0], 255 - rgb[:, 1], 255 - rgb[:, 2], np.full(4, 51)], 1).astype(np.uint8)
    printed = np.round((255.0 - inks[:, :3]) * 0.8).astype(np.uint8)
    cmyk = Image.frombytes("CMYK", (WIDTH, HEIGHT), quarters(inks).tobytes())
    put("cmyk.jpg", "JPEG", cmyk, {**_expected(printed), **jpeg}, **best)
    put("cmyk.tif", "TIFF", cmyk, {**_expected(printed), "suffix": ".tif"})
    lab = Image.new("LAB", (WIDTH, HEIGHT), (128, 128, 128))  # L* of 50.2, neutral: luminance 0.1855, sRGB 0.468
    neutral = np.full((4, 3), 0.468)
    put("lab.tif", "TIFF", lab, {**_expected(neutral, 1), "suffix": ".tif"})

    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    put("icc.png", "PNG", colour, {**_expected(rgb), "icc": srgb}, icc_profile=srgb)
    p3 = display_p3()
    put(
        "p3.jpg",
        "JPEG",
        colour,
        {**_expected(rgb), **jpeg, "icc": p3, "dpi": (72, 72)},
        icc_profile=p3,
        dpi=(72, 72),
        **best,
    )
    put("p3.webp", "WEBP", colour, {**_expected(rgb), "suffix": ".webp", "icc": p3}, icc_profile=p3, lossless=True)
    words = PngImagePlugin.PngInfo()
    words.add_text("Author", "somebody")
    words.add_itxt("Title", "größer 字", "de", "Titel")
    words.add_itxt("XML:com.adobe.xmp", (XMP % 6).decode())
    put(
        "text.png",
        "PNG",
        turned(colour, 6),
        {**_expected(rgb), "xmp": True, "text": {"Author": "somebody", "Title": "größer 字"}},
        pnginfo=words,
    )
    put(
        "xmp.jpg",
        "JPEG",
        turned(colour, 3),
        {**_expected(rgb), **jpeg, "xmp": True, "make": "Maker"},
        exif=exif(3),
        xmp=XMP % 3,
        **best,
    )

    put("progressive.jpg", "JPEG", colour, {**_expected(rgb), **jpeg}, progressive=True, **best)
    put("grey.jpg", "JPEG", plain, {**_expected(grey), **jpeg}, **best)
    put("rgb.bmp", "BMP", colour, {**_expected(rgb), "suffix": ".bmp"})
    put("rgb.ppm", "PPM", colour, {**_expected(rgb), "suffix": ".ppm"})
    put("still.gif", "GIF", colour.quantize(4), _expected(rgb))
    put(
        "rgba.webp",
        "WEBP",
        Image.fromarray(quarters(rgba)),
        {**_expected(rgba), "suffix": ".webp"},
        lossless=True,
        exact=True,
    )
    if features.check("avif"):
        put("rgb.avif", "AVIF", colour, {**_expected(rgb), **lossy, "suffix": ".avif"}, quality=95, subsampling="4:4:4")
    put("pages.tif", "TIFF", colour, {**_expected(rgb), "suffix": ".tif"}, save_all=True, append_images=[plain])
    put(
        "telephone.mpo", "MPO", colour, {**_expected(rgb), **jpeg}, save_all=True, append_images=[colour.copy()], **best
    )
    cases[-1].format = "JPEG"
    half = rgba.copy()
    half[:, 3] = [255, 0, 255, 255]
    put("premultiplied.tif", "TIFF", tiff(quarters(half), tags={338: (3, [1])}), {**_expected(half), "suffix": ".tif"})

    _animations(put, colour)
    dot = np.array([[[255, 0, 7]]], np.uint8)
    put("1x1.png", "PNG", Image.fromarray(dot), {"width": 1, "height": 1, "mean": dot[0, 0] / 255})
    line = np.repeat(np.array([[[0], [255]]], np.uint8), 2500, 0).reshape(5000, 1)
    put("1x5000.png", "PNG", Image.fromarray(line), {"width": 1, "height": 5000, "channels": 1, "mean": [0.5]})
    put("5000x1.png", "PNG", Image.fromarray(line.T), {"width": 5000, "height": 1, "channels": 1, "mean": [0.5]})
    small = quarters(rgb, 3, 5)
    put(
        "3x5.png",
        "PNG",
        Image.fromarray(small),
        {"width": 3, "height": 5, "mean": small.mean((0, 1)) / 255, "corners": rgb / 255, "tolerance": 0.05},
    )
    put("größer ünï 字 [a] 100%.png", "PNG", colour, _expected(rgb))
    put("no extension", "PNG", colour, _expected(rgb))
    put("really a jpeg.png", "JPEG", colour, {**_expected(rgb), **jpeg}, **best)
    put("RGB.JPEG", "JPEG", colour, {**_expected(rgb), **jpeg}, **best)
    return cases


def _animations(put: Any, colour: Image.Image) -> None:
    """Three frames each: the quarters; black in the upper left; the quarters in grey."""
    black = colour.copy()
    black.paste((0, 0, 0), (0, 0, WIDTH // 2, HEIGHT // 2))
    frames = [colour, black, colour.convert("L").convert("RGB")]
    still = {**_expected(QUARTERS[:, :3]), "frames": 3}
    times: list[float] = [70, 200, 30]
    rest = {"save_all": True, "append_images": frames[1:], "duration": times}
    put("moving.gif", "GIF", frames[0], {**still, "durations": times, "loop": 0, "suffix": ".gif"}, **rest, loop=0)
    put("once.gif", "GIF", frames[0], {**still, "durations": times, "loop": 1, "suffix": ".gif"}, **rest)
    put(
        "moving.webp",
        "WEBP",
        frames[0],
        {**still, "durations": times, "loop": 3, "suffix": ".webp"},
        **rest,
        loop=3,
        lossless=True,
    )
    put("moving.png", "PNG", frames[0], {**still, "durations": times, "loop": 2}, **rest, loop=2)
    clear = [frame.convert("RGBA") for frame in frames]
    for frame in clear:
        frame.putalpha(Image.fromarray(quarters(np.array([[255], [0], [255], [255]], np.uint8))[..., 0]))
    hidden = QUARTERS.copy()
    hidden[1, 3] = 0
    rest["append_images"] = clear[1:]
    expected = {**_expected(hidden), "frames": 3, "durations": times, "loop": 0}
    put("clear.gif", "GIF", clear[0], {**expected, "suffix": ".gif"}, **rest, loop=0, disposal=2)
    put("clear.webp", "WEBP", clear[0], {**expected, "suffix": ".webp"}, **rest, loop=0, lossless=True)
