"""Score weights on a data set: ``python scripts/evaluate.py -m best.safetensors --data datasets/sample/val``."""

import argparse
import math
from pathlib import Path

import sr
from sr.archs.sparsesr import set_sparsity
from sr.data import find_pictures
from sr.errors import run_script
from sr.evaluation import evaluate, mean


def main() -> None:
    parser = argparse.ArgumentParser(description="PSNR_Y and SSIM_Y of a network beside bicubic's.")
    parser.add_argument("-m", "--model", required=True, help="weights file, or the name of installed weights")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders: GT, or HR + LR_bicubic/X2 ...")
    parser.add_argument("--scale", type=int, help="must be the network's; default: the network's")
    parser.add_argument("--crop-border", type=int, help="pixels shaved off each side (default: the scale)")
    parser.add_argument("--tile", type=int, help="edge of a tile in input pixels, 0: none (default)")
    parser.add_argument("--sparsity", type=float, help="SparseSR: texture up to which windows skip attention, 0 to 1")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    args = parser.parse_args()

    network = sr.load(args.model)
    if args.scale not in (None, network.scale):
        raise sr.SRError(f"{args.model} enlarges {network.scale} times, not {args.scale}")
    if args.sparsity is not None:
        set_sparsity(network, args.sparsity)
    upscaler = sr.Upscaler(network, tile=args.tile or None, device=args.device)
    crop = network.scale if args.crop_border is None else args.crop_border
    sets = [find_pictures(root, network.scale) for root in args.data]
    results = [evaluate(upscaler, pictures, crop) for pictures in sets]
    for pictures, result in zip(sets, results, strict=True):
        print(f"{pictures.name}  x{network.scale}  PSNR_Y/SSIM_Y, crop {crop}, mean of per-picture values")
        print(f"{'picture':<24} {'bicubic':>15} {'model':>15} {'gain':>7}")
        scores = []
        for score in result:
            scores.append(score)
            print(_row(score.name, score.bicubic, score.model), flush=True)
        print(_row("mean", mean([s.bicubic for s in scores]), mean([s.model for s in scores])))
        identical = sum(math.isinf(s.model.psnr) or math.isinf(s.bicubic.psnr) for s in scores)
        if identical:
            print(f"{identical} pictures equal to their GT have infinite PSNR and are not in its mean")


def _row(name: str, bicubic: "sr.evaluation.Score", model: "sr.evaluation.Score") -> str:
    cells = (f"{s.psnr:.3f}/{s.ssim:.4f}" for s in (bicubic, model))
    return f"{name:<24} {next(cells):>15} {next(cells):>15} {model.psnr - bicubic.psnr:>+7.2f}"


if __name__ == "__main__":
    run_script(main)
