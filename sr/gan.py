"""Training for realistic textures: a network against a discriminator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sr.errors import SRError
from sr.losses import Adversarial
from sr.module import SRModule


class GANModule(SRModule):
    """Trains a super-resolution network whose losses include a discriminator's judgement.

    One optimiser step of the network is one of the discriminator; both use gradients at the weights before the step.
    To Lightning the network's optimiser is the only one, so steps, accumulation, clipping (of the network alone),
    precision, validation and averaging are those of :class:`SRModule`. The discriminator, its optimiser's state
    included, is in the checkpoints.

    Args:
        adversarial: the discriminator and the game.
        kwargs: as of :class:`SRModule`.

    Raises:
        SRError: the discriminator's optimiser does not take its settings.
    """

    def __init__(self, adversarial: Adversarial, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.adversarial = adversarial
        try:
            self.discriminator_optimizer = adversarial.make_optimizer(list(adversarial.discriminator.parameters()))
        except (TypeError, ValueError) as e:
            raise SRError(f"model.adversarial.optimizer: {e}") from e
        self._discriminator_rates = [group["lr"] for group in self.discriminator_optimizer.param_groups]
        # The state of the discriminator's optimiser waits here until the parameters are on their device.
        self._resumed: dict[str, Any] | None = None

    def objective(self, sr: Tensor, batch: dict[str, Any]) -> Tensor:
        total = super().objective(sr, batch)
        value = self.adversarial(sr, batch["gt"])
        self.log_train("gan", value)
        self._accumulate_gradients(sr, batch["gt"])
        return total + self.adversarial.weight * value

    def _accumulate_gradients(self, sr: Tensor, gt: Tensor) -> None:
        self.adversarial.requires_grad_(True)
        loss = self.adversarial.discriminator_loss(sr, gt)
        self.log_train("discriminator", loss)
        loss = loss / self.trainer.accumulate_grad_batches
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        with torch.autocast(sr.device.type, enabled=False):
            loss.backward()
        self.adversarial.requires_grad_(False)

    @property
    def _scaler(self) -> Any:
        """Of gradients in 16-mixed precision; both optimisers share it, and Lightning updates it."""
        return getattr(self.trainer.precision_plugin, "scaler", None)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """The discriminator's step: the gradients of both are there now, and the network's are final."""
        super().on_before_optimizer_step(optimizer)
        own = self.discriminator_optimizer
        if self._resumed is not None:
            own.load_state_dict(self._resumed)
            self._resumed = None
        schedule = self.adversarial.schedule or self.schedule
        factor = self.lr_factor * schedule(self.trainer.global_step / self.trainer.max_steps)
        for group, rate in zip(own.param_groups, self._discriminator_rates, strict=True):
            group["lr"] = rate * factor
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            self._step_discriminator(own)  # otherwise the network's step is skipped, and so is this
        own.zero_grad()

    def _step_discriminator(self, optimizer: Optimizer) -> None:
        gradients = []
        for parameter in self.adversarial.discriminator.parameters():
            parameter.grad = self.trainer.strategy.reduce(parameter.grad, reduce_op="mean")
            gradients.append(parameter.grad)
        if self._scaler is not None:
            self._scaler.step(optimizer)  # skips what is not finite, too
        elif torch.nn.utils.get_total_norm(gradients).isfinite():
            optimizer.step()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["discriminator_optimizer"] = self._resumed or self.discriminator_optimizer.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._resumed = checkpoint["discriminator_optimizer"]


def make_module(adversarial: Adversarial | None = None, **kwargs: Any) -> SRModule:
    """The module that a config describes.

    Args:
        adversarial: trains against a discriminator, for realistic textures. Default: without one.
        kwargs: as of :class:`SRModule`.
    """
    if adversarial is None:
        return SRModule(**kwargs)
    return GANModule(adversarial, **kwargs)
