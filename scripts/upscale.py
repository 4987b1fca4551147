"""Enlarge a picture: ``python scripts/upscale.py image.png [-m weights.safetensors] [-o large.png]``."""

import argparse
from pathlib import Path

import sr
from sr.archs.sparsesr import set_sparsity
from sr.errors import run_script
from sr.image import check_output, open_image, save_image, working_mode
from sr.weights import default_weights


def main() -> None:
    parser = argparse.ArgumentParser(description="Enlarge a picture with a super-resolution network.")
    parser.add_argument("image", type=Path, help="the picture")
    parser.add_argument("-m", "--model", help="weights file, or the name of known weights (default: installed)")
    parser.add_argument("-s", "--scale", type=int, help="pick installed weights of this scale (default: the first)")
    parser.add_argument("-o", "--output", type=Path, help="default: IMAGE_x2.png beside the picture")
    parser.add_argument("--tile", type=int, default=256, help="edge of a tile in input pixels, 0: none (default: 256)")
    parser.add_argument("--sparsity", type=float, help="SparseSR: texture up to which windows skip attention, 0 to 1")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    args = parser.parse_args()

    image = open_image(args.image)
    network = sr.load(args.model or default_weights(args.scale).name)
    if args.scale not in (None, network.scale):
        raise sr.SRError(f"{args.model} enlarges {network.scale} times, not {args.scale}; leave -s out")
    if args.sparsity is not None:
        set_sparsity(network, args.sparsity)
    mode = working_mode(image)
    suffix = ".tif" if mode == "F" else ".png"
    output = args.output or args.image.with_name(f"{args.image.stem}_x{network.scale}{suffix}")
    check_output(output, inputs=[args.image], mode=mode)
    kept = {key: image.info[key] for key in ("icc_profile", "exif", "dpi") if key in image.info}
    if image.mode in ("CMYK", "LAB", "YCbCr"):  # the result is RGB, for which the profile does not hold
        kept.pop("icc_profile", None)
    save_image(sr.Upscaler(network, tile=args.tile or None, device=args.device)(image), output, **kept)
    print(f"{args.image} -> {output}")


if __name__ == "__main__":
    run_script(main)
