"""Training samples and sampling of diffusion models: flow matching (velocity), and DDPM (noise).

An image x and noise e are mixed at a level n, from 0 (the image) to 1000 (the noise): a x + b e. The model gets this,
the level and the class, and predicts e, or the velocity e - x.

| | a, b at level n, with s = n / 1000 | target | levels of training |
|---|---|---|---|
| ``FlowMatching`` | 1 - s, s | e - x | ceil of 1000 sigmoid(z), z normal |
| ``NoisePrediction`` | sqrt of the product of 1 - beta_i for i to n; sqrt(1 - a^2) | e | uniform |

Flow matching: Liu et al. 2022, arXiv:2209.03003; its levels: Esser et al. 2024, arXiv:2403.03206, section 3.1 (Stable
Diffusion 3). Noise: Ho et al. 2020, arXiv:2006.11239, with beta from 1e-4 to 0.02. Sampling without noise: Euler's
method, and DDIM (Song et al. 2020, arXiv:2010.02502, eq. 12). Both go from level n to level m by estimates of x and e:
a_m x + b_m e.

Shapes: B images of C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.seeds import derive

LEVELS = 1000
Inputs = tuple[Tensor, Tensor, Any]  # images, time, classes or texts


def diffusion_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of a prediction: the ``loss_fn`` of a diffusion model.

    Args:
        outputs: (B, C_out, height, width). Channels behind the first C, of predicted variances, do not count.
        target: (B, C, height, width).
    """
    return F.mse_loss(outputs[:, : target.shape[1]].to(target.dtype), target)


@dataclass(frozen=True)
class _Diffusion:
    """Base class of ``FlowMatching`` and ``NoisePrediction``: training samples, and the loop of sampling.

    Args:
        seed: seed of the noise and of the levels of training.
    """

    seed: int = 0

    def training_pair(self, images: Tensor, classes: Any, numbers: Sequence[int]) -> tuple[Inputs, Tensor]:
        """Mix images with noise: return the model's inputs (mixture, time, class), and the target.

        Noise and level of a sample depend on the seed and on its number alone, so they are the same on every grid, for
        microbatches of any size, and when a run is resumed.

        Args:
            images: (B, C, height, width), with about the variance 1.
            classes: integers (B,), or what else the model takes beside images and time, such as Flux's (text, pooled).
            numbers: number of each sample, (B,), counted over the whole run: step * batch size + place in the batch.
        """
        if len(numbers) != len(images):
            raise ValueError(f"{len(images)} images have {len(numbers)} numbers. Give one number for each image.")
        noise, levels = torch.empty(images.shape), torch.empty(len(images), dtype=torch.int64)
        generator = torch.Generator()
        for row, number in enumerate(numbers):
            generator.manual_seed(derive(self.seed, "diffusion", int(number)))
            noise[row].normal_(generator=generator)
            levels[row] = self._level(generator)
        noise, levels = noise.to(images), levels.to(images.device)
        a, b = (factor[:, None, None, None].to(images.dtype) for factor in self._factors(levels))
        return (a * images + b * noise, self._time(levels), classes), self._target(images, noise)

    @torch.no_grad()
    def sample(
        self,
        predict: Callable[[Inputs], Tensor],
        noise: Tensor,
        classes: Any,
        *,
        steps: int = 50,
        guidance: float = 1.0,
    ) -> Tensor:
        """Make images from noise, in equal steps: (B, C, height, width).

        Args:
            predict: the model in evaluation mode, called with (images, time, classes). On a grid a function that calls
                ``engine.eval_batch``; all ranks then call ``sample``.
            noise: (B, C, height, width).
            classes: integers (B,), -1 for no class; or what else the model takes beside images and time.
            steps: number of steps, at most 1000.
            guidance: factor w of classifier-free guidance (Ho and Salimans 2022, arXiv:2207.12598): the prediction is
                p_none + w (p_class - p_none). With another factor than 1, which needs classes, each call has 2 B
                images.
        """
        if not 1 <= steps <= LEVELS:
            raise ValueError(f"steps is {steps}. Give 1 to {LEVELS} steps.")
        if guidance != 1.0 and not isinstance(classes, Tensor):
            raise ValueError(f"guidance is {guidance}, but only classes can be left out. Give guidance=1.0.")
        x = noise
        levels = torch.linspace(LEVELS, 0, steps + 1, dtype=torch.float64).round().long()
        a, b = (factor.tolist() for factor in self._factors(levels))
        for step in range(steps):
            time = self._time(levels[step : step + 1]).to(x.device).expand(len(x))
            if guidance == 1.0:
                output = predict((x, time, classes))
            else:
                doubled = (x.repeat(2, 1, 1, 1), time.repeat(2), torch.cat([classes, torch.full_like(classes, -1)]))
                known, none = predict(doubled).chunk(2)
                output = none + guidance * (known - none)
            clean, dirt = self._parts(x, output[:, : x.shape[1]].to(x.dtype), a[step], b[step])
            x = a[step + 1] * clean + b[step + 1] * dirt
        return x

    def _level(self, generator: torch.Generator) -> int:
        """Draw a level of training, 1 to 1000."""
        raise NotImplementedError

    def _factors(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors a and b of levels, in float64."""
        raise NotImplementedError

    def _time(self, levels: Tensor) -> Tensor:
        """Return the time that the model is given at levels."""
        raise NotImplementedError

    def _target(self, images: Tensor, noise: Tensor) -> Tensor:
        raise NotImplementedError

    def _parts(self, x: Tensor, output: Tensor, a: float, b: float) -> tuple[Tensor, Tensor]:
        """Return the estimates of image and noise from a mixture and the model's prediction."""
        raise NotImplementedError


class FlowMatching(_Diffusion):
    """Prediction of the velocity, as Stable Diffusion 3 and Flux train (rectified flow); sampling by Euler's method.

    >>> flow = triax.models.FlowMatching()
    >>> inputs, target = flow.training_pair(torch.ones(2, 1, 8, 8), torch.tensor([3, 4]), numbers=[0, 1])
    >>> inputs[1], target.shape
    (tensor([334, 680]), torch.Size([2, 1, 8, 8]))

    Args:
        seed: seed of the noise and of the levels of training.
    """

    def _level(self, generator: torch.Generator) -> int:
        return int(torch.randn((), generator=generator).sigmoid() * LEVELS) + 1

    def _factors(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        share = levels.double() / LEVELS
        return 1 - share, share

    def _time(self, levels: Tensor) -> Tensor:
        return levels

    def _target(self, images: Tensor, noise: Tensor) -> Tensor:
        return noise - images

    def _parts(self, x: Tensor, output: Tensor, a: float, b: float) -> tuple[Tensor, Tensor]:
        return x - b * output, x + a * output


class NoisePrediction(_Diffusion):
    """Prediction of the noise, as DDPM and DiT train, with time steps 0 to 999; sampling by DDIM.

    >>> ddpm = triax.models.NoisePrediction(seed=1)
    >>> inputs, target = ddpm.training_pair(torch.ones(2, 1, 8, 8), torch.tensor([3, 4]), numbers=[0, 1])
    >>> inputs[1], target.shape
    (tensor([793, 665]), torch.Size([2, 1, 8, 8]))

    Args:
        seed: seed of the noise and of the levels of training.
    """

    def _level(self, generator: torch.Generator) -> int:
        return int(torch.randint(LEVELS, (), generator=generator)) + 1

    def _factors(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        kept = 1 - torch.linspace(1e-4, 0.02, LEVELS, dtype=torch.float64)
        product = torch.cat([kept.new_ones(1), kept.cumprod(0)]).to(levels.device)[levels]
        return product.sqrt(), (1 - product).sqrt()

    def _time(self, levels: Tensor) -> Tensor:
        return levels - 1

    def _target(self, images: Tensor, noise: Tensor) -> Tensor:
        return noise

    def _parts(self, x: Tensor, output: Tensor, a: float, b: float) -> tuple[Tensor, Tensor]:
        return (x - b * output) / a, output
