"""What the settings of BasicSR, neosr and traiNNer are called here, and why some have no counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Their network -> ours, and what its arguments are called there and here.
OWN = {
    "rlfn": ("sr.archs.RLFN", {"feature_channels": "dim"}),
    "imdn": ("sr.archs.IMDN", {"nf": "dim", "num_modules": "blocks"}),
    "bsrn": ("sr.archs.BSRN", {"num_feat": "dim", "num_block": "blocks"}),
    "pan": ("sr.archs.PAN", {"nf": "dim", "unf": "up_dim", "nb": "blocks"}),
    "smfanet": ("sr.archs.SMFANet", {"dim": "dim", "n_blocks": "blocks", "ffn_scale": "expansion"}),
}
# Their network -> spandrel's, and arguments that have another name there.
THEIRS: dict[str, tuple[str, Mapping[str, str]]] = {
    "srvggnetcompact": ("Compact", {}),
    "rrdbnet": (
        "ESRGAN",
        {"num_in_ch": "in_nc", "num_out_ch": "out_nc", "num_feat": "num_filters", "num_block": "num_blocks"},
    ),
    "realplksr": ("PLKSR.RealPLKSR", {}),
}
SCALES = ("scale", "upscale", "up_scale", "upscale_factor", "upscaling_factor", "upsampling", "sr_rate")
CHANNELS = ("num_in_ch", "num_out_ch", "in_nc", "out_nc", "in_chans", "in_channels", "out_channels", "in_ch", "out_ch")
STAND_IN = "sr.archs.sparsesr_s"

LOSSES = {
    "l1loss": "L1Loss",
    "charbonnierloss": "CharbonnierLoss",
    "fftloss": "FFTL1Loss",
    "ssimloss": "SSIMLoss",
    "perceptualloss": "PerceptualLoss",
    "vggperceptualloss": "PerceptualLoss",
}
OPTIMIZERS = {
    **{name.lower(): f"torch.optim.{name}" for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adamax", "NAdam", "RAdam")},
    **{"adan": "timm.optim.Adan", "lion": "timm.optim.Lion"},
}
_VGG_LAYERS = {"conv1_2": 0.1, "conv2_2": 0.1, "conv3_4": 1, "conv4_4": 1, "conv5_4": 1}
# In the names below, * is any part between two dots, ** any number of parts.
# Values that ask for what happens here anyway; other values are listed.
SAME: dict[str, list[Any] | None] = {
    "model_type": [
        *("SRModel", "SwinIRModel", "HATModel", "RealESRNetModel", "RealESRGANModel", "ESRGANModel", "SRGANModel"),
        *("image", "sr", "otf"),
    ],
    "datasets.*.use_hflip": [True],
    "datasets.*.use_rot": [True],
    "datasets.*.use_shuffle": [True],
    "datasets.*.io_backend.type": ["disk"],
    "datasets.*.filename_tmpl": ["{}"],
    "datasets.*.name": None,  # a label
    "datasets.*.type": None,  # whether there are LQ pictures tells it
    "**.reduction": ["mean"],
    "**.criterion": ["l1"],
    "**.vgg_type": ["vgg19"],
    "**.use_input_norm": [True],
    "**.range_norm": [False],
    "**.style_weight": [0],
    "**.layer_weights": [_VGG_LAYERS],
    "**.real_label_val": [1],
    "**.fake_label_val": [0],
    "network_d.num_in_ch": [3],
    "network_d.skip_connection": [True],
    "network_g.num_grow_ch": [32],
    "path.strict_load_g": [True],
    "path.param_key_g": ["params_ema"],
    "train.scheduler.restart_weights": [[1]],
    "train.net_d_iters": [1],
    "train.net_d_init_iters": [0],
    "val.metrics.*.type": ["calculate_psnr", "calculate_ssim"],
    "val.metrics.*.better": ["higher"],
    "val.metrics.*.test_y_channel": [True],
    "logger.use_tb_logger": [True],
    **{f"network_g.{name}": [3] for name in CHANNELS},
}
# What has no counterpart, and what to do about it; the first pattern that fits.
WHY = {
    "model_type": "pictures are enlarged, with a discriminator where there is a gan_opt; see that this is meant",
    "datasets.*.use_*": "patches are always mirrored, turned and shuffled",
    "datasets.*.meta_info*": "all pictures of a folder are used; copy or link those that the list names into one",
    "datasets.*.filename_tmpl": "pairs are found by the usual endings (x4, _LR); rename the pictures if they are not",
    "datasets.*.io_backend.**": "pictures are read from files, and packed once for all processes",
    "datasets.*.*enlarge_ratio": "pictures are drawn without end, and the length of a run is trainer.max_steps",
    "datasets.*.*prefetch*": "threads cut patches ahead (data.num_workers)",
    "datasets.**": "of the data; if it is of the degradation, set it in the file that data.degradation names",
    "network_g.type": f"neither the project nor spandrel has it; {STAND_IN} stands in its place: choose a network",
    "network_g.**": "the network takes no such argument",
    "network_d.**": "the discriminator is sr.losses.UNetDiscriminator, with its number of features alone",
    "path.pretrain_network_g": "they are another network's",
    "path.param_key_*": "averaged weights are preferred where a file has both",
    "path.resume_state": "states of other tools cannot be continued; start from the weights (model.weights)",
    "path.**": "only the network starts from a file",
    "train.warmup_iter": "only sr.schedules.Cosine warms up",
    "train.scheduler.**": "a schedule is a function of the fraction of the run: one cosine over all of it, or steps",
    "train.ldl_opt.**": "there is no such loss",
    "train.gan_opt.gan_type": "games are vanilla, hinge and relativistic; vanilla is taken",
    "train.optim_*": "the optimiser is left at its default there",
    "train.*_opt.**": "no loss of the project has it; see sr/losses",
    "train.losses.**": "no loss of the project has it; see sr/losses",
    "val.save_img": "a preview of each validation set is always written",
    "val.metrics.*.test_y_channel": "validation is on luma; score RGB with scripts/evaluate.py --channels rgb",
    "val.metrics.**": "PSNR and SSIM on luma are always there; more with scripts/evaluate.py",
    "logger.save_checkpoint_freq": "last.ckpt is written at each validation",
    "logger.wandb.**": "the logs are TensorBoard and CSV; set trainer.logger for others",
    "dist_params.**": "Lightning chooses; see trainer.strategy",
    "**gt_usm": "the file that data.degradation names sharpens the GT, or does not",
    "queue_size": "every batch is degraded anew, without a queue",
    "**kernel**": "set it in the file that data.degradation names",
    "**_range**": "set it in the file that data.degradation names",
    "**_prob**": "set it in the file that data.degradation names",
}
