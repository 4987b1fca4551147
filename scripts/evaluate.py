"""Tables of PSNR and SSIM beside bicubic's: ``python scripts/evaluate.py -m A -m B --data Set5 Set14 --scale 4``."""

import argparse
from pathlib import Path

import sr
from sr.data import find_pictures
from sr.errors import run_script
from sr.evaluation import PictureWriter, Report, SetScores, cell, evaluate, matrix, open_models
from sr.metrics import PROTOCOLS
from sr.metrics.protocols import every_protocol


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PSNR and SSIM of models on data sets, beside bicubic's.")
    add = parser.add_argument
    add("-m", "--model", action="append", default=[], help="name of known weights, file, .onnx, or folder of pictures")
    add("--data", type=Path, nargs="+", required=True, help="folders: GT, or HR + LR_bicubic/X2 ...")
    add("--scale", type=int, nargs="+", default=[], help="one table each; default: the models'")
    add("--protocol", choices=PROTOCOLS, default="sisr-y", help="how to compare (default: sisr-y)")
    add("--crop-border", type=int, help="pixels shaved off each side (default: the protocol's)")
    add("--channels", choices=("y", "full-range-y", "rgb"), help="what to compare (default: the protocol's)")
    add("--no-round", dest="rounded", action="store_false", help="compare without rounding to 8 bits")
    add("--pooled", action="store_true", help="PSNR of the squared error of a whole set")
    add("--why", action="store_true", help="print the scores by every protocol, to find out which one a paper used")
    add("--perceptual", nargs="+", default=[], choices=("lpips", "dists"), help="more metrics; they need weights")
    add("--modcrop", action="store_true", help="cut a GT and results of slightly different sizes to multiples")
    add("--output", type=Path, help="folder for results.md, results.csv and results.json")
    add("--save", type=Path, help="folder for the results' pictures and comparison strips")
    add("--crop", type=int, nargs=4, metavar=("X", "Y", "W", "H"), help="strips' crop (default: largest difference)")
    add("--tile", type=int, help="edge of a tile in input pixels, 0: none (default)")
    add("--sparsity", type=float, help="SparseSR: texture up to which windows skip attention, 0 to 1")
    add("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    args = parser.parse_args()
    if args.crop and (min(args.crop) < 0 or min(args.crop[2:]) < 1):
        parser.error("--crop: X and Y are at least 0, W and H at least 1")
    return args


def main() -> None:
    args = parse()
    changes = {} if args.crop_border is None else {"crop_border": args.crop_border}
    if args.channels:
        changes |= {"test_y_channel": args.channels != "rgb", "full_range": args.channels == "full-range-y"}
    protocol = PROTOCOLS[args.protocol].but(rounded=args.rounded, pooled=args.pooled, **changes)
    models = open_models(args.model, args.scale, tile=args.tile or None, sparsity=args.sparsity, device=args.device)
    scales = args.scale or sorted({model.scale for model in models})
    if not scales:
        raise sr.SRError("without a model, give a scale, e.g. --scale 4")
    sets = [find_pictures(root, scale) for scale in scales for root in args.data]
    if len({(pictures.scale, pictures.name) for pictures in sets}) < len(sets):
        raise sr.SRError("two data sets have the same name; give folders of different names, each once")
    perceptual = {}
    if args.perceptual:  # torchvision takes a second to import
        from sr.metrics.perceptual import PERCEPTUAL

        perceptual = {s: {m: PERCEPTUAL[m](crop_border=protocol.crop(s)) for m in args.perceptual} for s in scales}

    runs = []
    for pictures in sets:
        fitting = [model for model in models if model.scale == pictures.scale]
        protocols = [protocol, *(every_protocol(pictures.scale) if args.why else [])]
        writer = PictureWriter(args.save, pictures.name, pictures.scale, args.crop) if args.save else None
        metrics = perceptual.get(pictures.scale)
        result = evaluate(fitting, pictures, protocols, perceptual=metrics, modcrop=args.modcrop, on_picture=writer)
        runs.append((pictures, ["bicubic", *(model.name for model in fitting)], protocols, result))

    results = []
    for pictures, names, protocols, result in runs:
        print(f"{pictures.name} x{pictures.scale}, PSNR/SSIM by {protocol.name}: {', '.join(names)}")
        scores = SetScores(pictures.name, pictures.scale, names, [])
        results.append(scores)
        for picture in result:
            scores.pictures.append(picture)
            print(f"{picture.name:<24}", *(cell(s[0].psnr, s[0].ssim) for s in picture.scores.values()), flush=True)
        print()
        if args.why:
            print(matrix(scores, protocols[1:], offset=1))
    sources = {"bicubic": "MATLAB's imresize"} | {model.name: model.source for model in models}
    first = next(iter(perceptual.values()), {})
    report = Report(results, protocol, sources, {name: metric.implementation for name, metric in first.items()})
    print(report.tables())
    if args.output:
        report.write(args.output)


if __name__ == "__main__":
    run_script(main)
