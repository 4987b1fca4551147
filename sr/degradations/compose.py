"""How steps make a degradation: in order, by chance, shuffled."""

from __future__ import annotations

from torch import Tensor

from sr.degradations.base import Degradation, Draws, Step, check_probabilities
from sr.degradations.blur import Sharpen
from sr.errors import SRError


class Pipeline(Degradation):
    """Steps one after another; the result is clamped and rounded to 8 bits.

    Args:
        steps: the last of those that change the size has to end at 1/scale, as :class:`~sr.degradations.Resize` does.
        sharpen: sharpens the GT first; the LQ is made from the sharpened GT, which is also what is trained towards.
    """

    def __init__(self, steps: list[Step], sharpen: Sharpen | None = None) -> None:
        self.steps = Chain(steps)
        self.sharpen = sharpen

    def degrade(self, gt: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        if self.sharpen is not None:
            gt = self.sharpen(gt)
        lq = self.steps(gt, draws)
        if tuple(lq.shape[-2:]) != draws.lq_size:
            h, w = lq.shape[-2:]
            raise SRError(f"the steps end at {h} x {w} instead of 1/scale; add sr.degradations.Resize after the others")
        return (lq.clamp(0, 1) * 255).round().div(255), gt


class Chain(Step):
    """Steps one after another, as one step.

    Args:
        steps: in their order.
    """

    def __init__(self, steps: list[Step]) -> None:
        self.steps = list(steps)

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        for step in self.steps:
            x = step(x, draws)
        return x


class RandomChoice(Step):
    """One of several steps for each picture, or none.

    Drawn for each picture; what the chosen step draws for a whole batch, it draws for all pictures that chose it.

    Args:
        steps: to choose from; all have to end at the same size (which is the input's, if "none" is possible).
        probabilities: one for each step; what is missing to 1 leaves a picture as it is.

    Raises:
        SRError: steps and probabilities differ in number; probabilities are wrong; the sizes differ at a call.
    """

    def __init__(self, steps: list[Step], probabilities: list[float]) -> None:
        if len(steps) != len(probabilities):
            raise SRError(f"RandomChoice has {len(steps)} steps and {len(probabilities)} probabilities; give one each")
        self.steps = list(steps)
        self.probabilities = check_probabilities("RandomChoice's probabilities", probabilities, complete=False)

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        chosen = draws.choices(len(x), self.probabilities)
        result: Tensor | None = None
        for i, step in enumerate([*self.steps, Chain([])]):
            index = (chosen == i).nonzero().squeeze(1).to(x.device)
            if len(index) == 0:
                continue
            if len(index) == len(x):
                return step(x, draws)
            part = step(x.index_select(0, index), draws)
            if result is None:
                result = part.new_empty(len(x), *part.shape[1:])
            if result.shape[1:] != part.shape[1:]:
                raise SRError("the steps of a RandomChoice end at different sizes, which one batch cannot hold")
            result.index_copy_(0, index, part)
        return x if result is None else result


class Shuffle(Step):
    """All steps, in an order drawn for each batch.

    Args:
        steps: to shuffle.
        in_order: positions in ``steps``, from 0, of those that keep their order among themselves.

    Raises:
        SRError: a position that does not exist.
    """

    def __init__(self, steps: list[Step], in_order: list[int]) -> None:
        if any(not 0 <= i < len(steps) for i in in_order) or len(set(in_order)) != len(in_order):
            raise SRError(f"in_order is different positions from 0 to {len(steps) - 1}, not {in_order}")
        self.steps = list(steps)
        self.in_order = sorted(in_order)

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        order = draws.order(len(self.steps))
        places = [place for place, i in enumerate(order) if i in self.in_order]
        for place, i in zip(places, self.in_order, strict=True):
            order[place] = i
        for i in order:
            x = self.steps[i](x, draws)
        return x
