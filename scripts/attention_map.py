"""Draw where a pixel looked: ``python scripts/attention_map.py image.png --at 40 25 -o map.png``."""

import argparse
from pathlib import Path

import torch
from PIL import Image

import sr
from sr.attention_map import attention_map
from sr.errors import run_script
from sr.image import check_output, open_image, save_image, to_image, to_tensor
from sr.weights import default_weights


def main() -> None:
    parser = argparse.ArgumentParser(description="Heat map of the attention of one pixel of a picture.")
    parser.add_argument("image", type=Path, help="the picture")
    parser.add_argument("--at", type=int, nargs=2, metavar=("X", "Y"), required=True, help="the pixel")
    parser.add_argument("-m", "--model", help="weights file, or the name of known weights (default: installed)")
    parser.add_argument("-o", "--output", type=Path, help="default: IMAGE_attention.png beside the picture")
    args = parser.parse_args()

    output = args.output or args.image.with_name(f"{args.image.stem}_attention.png")
    check_output(output, inputs=[args.image])
    lq = to_tensor(open_image(args.image).convert("RGB"))
    column, row = args.at
    weights = attention_map(sr.load(args.model or default_weights().name), lq, row, column)
    # The square root shows small weights, too; the pixel itself is green, what it looked at red on the grey picture.
    heat = (weights / weights.max().clamp_min(1e-12)).sqrt()
    grey = lq.mean(0) * (1 - heat)
    drawn = torch.stack((grey + heat, grey, grey))
    drawn[:, row, column] = torch.tensor([0.0, 1.0, 0.0])
    picture = to_image(drawn)
    factor = max(1, 512 // max(picture.size))
    save_image(picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST), output)
    print(f"{args.image} -> {output}")


if __name__ == "__main__":
    run_script(main)
