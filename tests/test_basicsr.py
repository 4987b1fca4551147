"""Configs of other tools: what becomes of each setting, and that the result trains."""

import copy
import itertools
from pathlib import Path

import pytest
import torch
import yaml

import sr
from sr.basicsr import convert, read
from sr.losses import CharbonnierLoss
from sr.schedules import Cosine, MultiStep

COMMON = """
num_gpu: 1
manual_seed: 10
datasets:
  train:
    name: DIV2K
    type: PairedImageDataset
    dataroot_gt: train_hr
    dataroot_lq: train_lr
    meta_info_file: meta.txt
    filename_tmpl: '{}'
    io_backend: {type: disk}
    gt_size: 16
    use_hflip: true
    use_rot: true
    num_worker_per_gpu: 0
    batch_size_per_gpu: 2
    dataset_enlarge_ratio: 100
    prefetch_mode: ~
  val:
    name: Set5
    type: PairedImageDataset
    dataroot_gt: val_hr
    dataroot_lq: val_lr
    io_backend: {type: disk}
path: {pretrain_network_g: ~, strict_load_g: true, resume_state: ~}
train:
  ema_decay: 0.999
  optim_g: {type: Adam, lr: !!float 2e-4, weight_decay: 0, betas: [0.9, 0.99]}
  scheduler: {type: MultiStepLR, milestones: [250, 400, 450, 475, 500], gamma: 0.5}
  total_iter: 500
  warmup_iter: -1
  pixel_opt: {type: L1Loss, loss_weight: 1.0, reduction: mean}
val:
  val_freq: !!float 5e2
  save_img: false
  metrics:
    psnr: {type: calculate_psnr, crop_border: 2, test_y_channel: true}
    ssim: {type: calculate_ssim, crop_border: 2, test_y_channel: true}
logger: {print_freq: 100, save_checkpoint_freq: !!float 5e3, use_tb_logger: true, wandb: {project: ~, resume_id: ~}}
dist_params: {backend: nccl, port: 29500}
"""
CONFIGS = {
    "edsr": """
name: EDSR_Mx2
model_type: SRModel
scale: 2
network_g: {type: EDSR, num_in_ch: 3, num_out_ch: 3, num_feat: 64, num_block: 16, upscale: 2, res_scale: 1}
""",
    "rrdb": """
name: RRDBNet_x2
model_type: SRModel
scale: 2
network_g: {type: RRDBNet, num_in_ch: 3, num_out_ch: 3, num_feat: 8, num_block: 2, num_grow_ch: 32, scale: 2}
""",
    "swinir": """
name: SwinIR_x2
model_type: SwinIRModel
scale: 2
network_g: {type: SwinIR, upscale: 2, in_chans: 3, img_size: 8, window_size: 8, img_range: 1., depths: [2],
  embed_dim: 12, num_heads: [2], mlp_ratio: 2, upsampler: pixelshuffledirect, resi_connection: 1conv}
""",
    "safmn": """
name: SAFMN_x2
model_type: SRModel
scale: 2
network_g: {type: SAFMN, dim: 8, n_blocks: 2, ffn_scale: 2.0, upscaling_factor: 2}
train:
  ema_decay: 0.999
  optim_g: {type: Adam, lr: !!float 1e-3, betas: [0.9, 0.99]}
  scheduler: {type: CosineAnnealingRestartLR, periods: [500], restart_weights: [1], eta_min: !!float 1e-5}
  total_iter: 500
  warmup_iter: 50
  pixel_opt: {type: L1Loss, loss_weight: 1.0, reduction: mean}
  fft_opt: {type: FFTLoss, loss_weight: 0.05, reduction: mean}
""",
    "realesrgan": """
name: finetune_RealESRGANx2
model_type: RealESRGANModel
scale: 2
l1_gt_usm: true
resize_prob: [0.2, 0.7, 0.1]
jpeg_range: [30, 95]
queue_size: 180
datasets:
  train: {type: RealESRGANDataset, dataroot_gt: train_hr, gt_size: 16, batch_size_per_gpu: 2, num_worker_per_gpu: 0,
    blur_kernel_size: 21, sinc_prob: 0.1, io_backend: {type: disk}}
network_g: {type: SRVGGNetCompact, num_in_ch: 3, num_out_ch: 3, num_feat: 8, num_conv: 2, upscale: 2, act_type: prelu}
network_d: {type: UNetDiscriminatorSN, num_in_ch: 3, num_feat: 16, skip_connection: true}
path: {pretrain_network_g: realesr.pth, param_key_g: params_ema, strict_load_g: true, pretrain_network_d: d.pth}
train:
  ema_decay: 0.999
  optim_g: {type: Adam, lr: !!float 1e-4, betas: [0.9, 0.99]}
  optim_d: {type: Adam, lr: !!float 2e-4, betas: [0.9, 0.99]}
  scheduler: {type: MultiStepLR, milestones: [400], gamma: 0.5}
  total_iter: 400
  pixel_opt: {type: L1Loss, loss_weight: 1.0, reduction: mean}
  perceptual_opt: {type: PerceptualLoss, layer_weights: {conv1_2: 0.1, conv2_2: 0.1, conv3_4: 1, conv4_4: 1,
    conv5_4: 1}, vgg_type: vgg19, use_input_norm: true, perceptual_weight: !!float 1.0, style_weight: 0,
    range_norm: false, criterion: l1}
  gan_opt: {type: GANLoss, gan_type: vanilla, real_label_val: 1.0, fake_label_val: 0.0, loss_weight: !!float 1e-1}
  net_d_iters: 1
  net_d_init_iters: 0
""",
    "neosr": """
name: train_span
model_type: image
scale: 2
use_amp: true
bfloat16: true
compile: false
datasets:
  train: {type: paired, dataroot_gt: train_hr, dataroot_lq: train_lr, patch_size: 8, batch_size: 2, accumulate: 2,
    augmentation: [none, mixup], io_backend: {type: disk}}
  val: {name: val, type: paired, dataroot_gt: val_hr, dataroot_lq: val_lr, io_backend: {type: disk}}
network_g: {type: span, feature_channels: 8}
train:
  ema: 0.999
  grad_clip: true
  optim_g: {type: adamw, lr: !!float 1e-3, betas: [0.98, 0.99], weight_decay: 0.01}
  scheduler: {type: multisteplr, milestones: [60, 120], gamma: 0.5}
  losses:
    - {type: charbonnierloss, loss_weight: 0.5}
    - {type: mssim_loss, loss_weight: 1.0}
logger: {total_iter: 200, print_freq: 10}
""",
}


def foreign(name):
    return yaml.safe_load(COMMON) | yaml.safe_load(CONFIGS[name])


def keys(notes):
    assert all(note.startswith("no counterpart: ") and "(" in note for note in notes)
    return [note.split(": ")[1] for note in notes]


# --- what becomes of it ----------------------------------------------------------------------------------------------


def test_what_both_have_is_taken_over():
    own, notes = convert(foreign("rrdb"))
    assert own["name"] == "RRDBNet_x2" and own["seed_everything"] == 10
    # At x2 BasicSR folds the picture into four times the channels and enlarges that by 4.
    assert own["model"]["network"]["init_args"] == {
        "scale": 2,
        "arch": "ESRGAN",
        "args": {"in_nc": 12, "out_nc": 3, "num_filters": 8, "num_blocks": 2, "scale": 4, "shuffle_factor": 2},
    }
    adam = {"lr": 2e-4, "betas": [0.9, 0.99], "weight_decay": 0}
    assert own["model"]["optimizer"] == {"class_path": "torch.optim.Adam", "init_args": adam}
    assert own["model"]["losses"] == [{"class_path": "sr.losses.L1Loss", "init_args": {"weight": 1.0}}]
    assert (own["model"]["ema_decay"], own["model"]["crop_border"]) == (0.999, 2)
    pairs = {"gt": "train_hr", "lq": "train_lr"}
    assert own["data"]["train"] == [{"class_path": "sr.data.PairedFolder", "init_args": pairs}]
    assert own["data"]["val"][0]["init_args"] == {"gt": "val_hr", "lq": "val_lr", "name": "Set5"}
    assert (own["data"]["gt_size"], own["data"]["batch_size"], own["data"]["num_workers"]) == (16, 2, 0)
    assert own["trainer"] == {"max_steps": 500, "val_check_interval": 500, "log_every_n_steps": 100, "devices": 1}
    assert keys(notes) == [
        "datasets.train.meta_info_file",
        "datasets.train.dataset_enlarge_ratio",
        "val.save_img",
        "logger.save_checkpoint_freq",
        "dist_params.backend",
        "dist_params.port",
    ]


def test_steps_are_those_of_the_original():
    """Rates after each optimiser step, against PyTorch's own schedulers with the original's numbers."""
    own, _ = convert(foreign("rrdb"))
    steps = MultiStep(**own["model"]["scheduler"]["init_args"])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.MultiStepLR(optimizer, [250, 400, 450, 475, 500], 0.5)
    for step in range(500):
        assert steps(step / 500) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_the_cosine_ends_where_the_original_does():
    own, notes = convert(foreign("safmn"))
    cosine = Cosine(**own["model"]["scheduler"]["init_args"])
    assert cosine(0) == 0 and cosine(0.1) == pytest.approx(1)
    assert 1e-3 * cosine(1) == pytest.approx(1e-5)
    assert [(loss["class_path"], loss["init_args"]["weight"]) for loss in own["model"]["losses"]] == [
        ("sr.losses.L1Loss", 1.0),
        ("sr.losses.FFTL1Loss", 0.05),
    ]
    assert not [key for key in keys(notes) if key.startswith("train.")]


def test_restarts_have_no_counterpart():
    config = foreign("safmn")
    config["train"]["scheduler"] |= {"periods": [250, 250], "restart_weights": [1, 0.5]}
    _, notes = convert(config)
    assert [key for key in keys(notes) if "scheduler" in key] == [
        "train.scheduler.periods",
        "train.scheduler.restart_weights",
    ]


def test_charbonnier_has_the_value_of_the_original():
    config = foreign("rrdb")
    config["train"]["pixel_opt"] = {"type": "CharbonnierLoss", "loss_weight": 1.0, "eps": 1e-4}
    own, _ = convert(config)
    loss = CharbonnierLoss(**own["model"]["losses"][0]["init_args"])
    a, b = torch.rand(2, 1, 3, 4, 4)
    assert loss(a, b).item() == pytest.approx(((a - b) ** 2 + 1e-4).sqrt().mean().item())


def test_a_fine_tuning_of_real_esrgan():
    own, notes = convert(foreign("realesrgan"))
    game = own["model"]["adversarial"]
    assert (game["weight"], game["game"], game["discriminator"]) == (0.1, "vanilla", {"features": 16})
    assert game["optimizer"]["init_args"]["lr"] == 2e-4
    assert own["model"]["weights"] == "realesr.pth"
    assert [loss["class_path"] for loss in own["model"]["losses"]] == ["sr.losses.L1Loss", "sr.losses.PerceptualLoss"]
    assert own["data"]["degradation"] == "configs/degradations/real_esrgan.yaml"
    assert own["data"]["train"] == [{"class_path": "sr.data.GTFolder", "init_args": {"root": "train_hr"}}]
    assert own["data"]["val"] == []
    left = {"l1_gt_usm", "resize_prob", "jpeg_range", "queue_size", "path.pretrain_network_d"}
    assert left | {"datasets.train.blur_kernel_size", "datasets.train.sinc_prob"} <= set(keys(notes))
    config = foreign("realesrgan") | {"model_type": "ESRGANModel"}
    game = convert(config)[0]["model"]["adversarial"]
    assert (game["game"], game["weight"]) == ("relativistic", 0.05)  # theirs is the mean of two terms, ours the sum


@pytest.mark.parametrize(("model", "norm"), [("image", False), ("sr", None)])
def test_span_has_other_defaults_in_neosr(model, norm):
    config = foreign("neosr") | {"model_type": model, "network_g": {"type": "span"}}
    args = convert(config)[0]["model"]["network"]["init_args"]["args"]
    assert args.get("norm") is norm
    assert args.get("img_range") == (None if norm is None else 1.0)


def test_an_x3_of_rrdb_folds_nothing():
    config = foreign("rrdb")
    config["scale"] = config["network_g"]["scale"] = 3
    args = convert(config)[0]["model"]["network"]["init_args"]
    assert args["scale"] == 3 and "shuffle_factor" not in args["args"] and args["args"].get("scale", 3) == 3


def test_a_config_of_neosr():
    own, notes = convert(foreign("neosr"))
    assert own["data"]["gt_size"] == 16  # patch_size counts LQ pixels
    assert own["trainer"]["accumulate_grad_batches"] == 2 and own["trainer"]["precision"] == "bf16-mixed"
    assert own["trainer"]["max_steps"] == 200
    assert own["model"]["optimizer"]["class_path"] == "torch.optim.AdamW"
    assert own["model"]["losses"] == [
        {"class_path": "sr.losses.CharbonnierLoss", "init_args": {"weight": 0.5, "eps": 1e-6}}
    ]
    assert {"train.losses.1.type", "train.losses.1.loss_weight", "train.grad_clip"} <= set(keys(notes))
    assert {"datasets.train.augmentation"} <= set(keys(notes))


def test_a_network_that_nobody_has_is_named_and_its_weights_are_left_out():
    config = foreign("edsr")
    config["path"]["pretrain_network_g"] = "edsr.pth"
    own, notes = convert(config)
    assert own["model"]["network"] == {"class_path": "sr.archs.sparsesr_s", "init_args": {"scale": 2}}
    assert "weights" not in own["model"]
    assert {"network_g.type", "network_g.num_feat", "network_g.res_scale", "path.pretrain_network_g"} <= set(
        keys(notes)
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_every_setting_is_used_or_listed(name):
    """Change one leaf at a time: the result changes, or the list does. What changes nothing is listed by name."""
    config = foreign(name)
    before, notes = convert(config)
    labels = {"datasets.train.name", "datasets.train.type", "datasets.val.type"}  # say what the folders say anyway

    def leaves(node, path=()):
        pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        if not isinstance(node, dict | list):
            yield path
        yield from itertools.chain.from_iterable(leaves(value, (*path, key)) for key, value in pairs)

    for path in leaves(config):
        changed = copy.deepcopy(config)
        node = changed
        for key in path[:-1]:
            node = node[key]
        old = node[path[-1]]
        node[path[-1]] = (not old) if isinstance(old, bool) else 7 if isinstance(old, int | float) else "else"
        try:
            after = convert(changed)
        except sr.SRError:
            continue  # it was looked at
        assert after != (before, notes) or ".".join(map(str, path)) in labels, path


def test_a_later_leaf_that_nobody_knows_is_listed():
    config = foreign("rrdb")
    config["train"]["frobnicate"] = {"deep": {"er": 3}}
    _, notes = convert(config)
    assert "train.frobnicate.deep.er" in keys(notes)
    assert "frobnicate" not in str(convert(foreign("rrdb")))


# --- it runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pictures(make_pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SR_RUN_DIR", raising=False)
    for kind in ("train", "val"):
        make_pictures(f"{kind}_hr", {"a.png": (64, 48), "b.png": (48, 64)})
        make_pictures(f"{kind}_lr", {"a.png": (32, 24), "b.png": (24, 32)})
    folder = Path(sr.__file__).parents[1] / "configs"
    (tmp_path / "configs").symlink_to(folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_result_trains(name, pictures, start):
    config, _ = convert(foreign(name))
    config["model"].pop("weights", None)
    if name == "realesrgan":  # VGG's weights are not here; degraded pictures are a second each
        config["model"]["losses"].pop()
    small = ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--trainer.accelerator", "cpu"]
    cli = start(config, *small, "--trainer.precision", "32-true")
    assert cli.trainer.global_step == 2
    assert cli.datamodule.scale == cli.model.network.scale == 2


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("scale",), "four", "several scales: four, 2"),
        (("scale",), 4, "several scales: 4, 2"),
        (("network_g", "num_in_ch"), 1, "networks here take and give RGB"),
        (("scale",), 2.5, "several scales: 2.5, 2"),
        (("train", "total_iter"), 2.5, "total_iter is a whole number, not 2.5"),
        (("train", "total_iter"), None, "how long to train"),
        (("train", "optim_g", "lr"), 0, "lr is larger than 0"),
        (("datasets", "train", "dataroot_gt"), None, "no pictures to train on"),
        (("datasets", "train", "dataroot_gt"), ["a", "b"], "2 folders and dataroot_lq 1"),
        (("datasets", "train", "gt_size"), "large", "gt_size is a number"),
    ],
)
def test_mistakes_are_named(path, value, message):
    config = foreign("rrdb")
    node = config
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(sr.SRError, match=message):
        convert(config)


def test_files_that_are_no_configs(tmp_path):
    for name, text, message in (
        ("a.yml", "a: [", "cannot be read as a config"),
        ("b.yml", "model: {}", "no section network_g"),
        ("c.yml", "- 1", "no section network_g"),
        ("d.toml", "= 1", "cannot be read as a config|Python 3.11"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(sr.SRError, match=message):
            read(tmp_path / name)
    with pytest.raises(sr.SRError, match="cannot be read"):
        read(tmp_path / "none.yml")


def test_toml_is_read(tmp_path):
    pytest.importorskip("tomllib")
    text = 'scale = 2\n[network_g]\ntype = "span"\n[datasets.train]\ndataroot_gt = "hr"\npatch_size = 32\n'
    (tmp_path / "a.toml").write_text(text + "[train]\ntotal_iter = 10\n")
    own, notes = convert(read(tmp_path / "a.toml"))
    assert own["data"]["gt_size"] == 64 and not notes
