"""Small tasks whose optimum is known."""

from __future__ import annotations

import torch


class LinearTask:
    """Least squares on generated data: `y = x W + noise`, samples numbered, every sample a function of its number."""

    def __init__(
        self, seed: int = 0, units: int = 64, unit_samples: int = 256, width: int = 8, layers: int = 3
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Sequential()
        for index in range(layers):
            layer = torch.nn.Linear(width, width)
            for parameter in layer.parameters():
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
            self.model.add_module(f"layer{index}", layer)
        self._truth = torch.randn(width, width, generator=torch.Generator().manual_seed(99))
        self._units, self._samples, self._width = units, unit_samples, width
        self.read: list[tuple[int, int, int, int]] = []
        """Every slice that was read: data pass, unit, start, count."""

    def num_units(self) -> int:
        return self._units

    def unit_samples(self, data_pass: int, unit_index: int) -> int:
        return self._samples

    def batch(self, data_pass: int, unit_index: int, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append((data_pass, unit_index, start, count))
        generator = torch.Generator().manual_seed(7919 * unit_index + 13)
        x = torch.randn(self._samples, self._width, generator=generator)[start : start + count]
        return x, x @ self._truth

    def batch_tokens(self, batch: tuple[torch.Tensor, torch.Tensor]) -> int:
        return batch[0].shape[0]

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return ((self.model(x) - y) ** 2).mean()

    def held_out_loss(self) -> float:
        generator = torch.Generator().manual_seed(123456)
        x = torch.randn(512, self._width, generator=generator)
        with torch.no_grad():
            return float(self.loss((x, x @ self._truth)))


class ConstantGradientTask(LinearTask):
    """A loss that is linear in the parameters: the gradient is the same for every sample, everywhere."""

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for index, parameter in enumerate(self.model.parameters()):
            slopes = torch.arange(1, parameter.numel() + 1, dtype=torch.float32).reshape(parameter.shape)
            total = total + (parameter * torch.sin(slopes + index)).sum()
        return total


class KnownLoss:
    """A loss whose gradient is known: what an inner step asks of a scalar tensor, without the search for it, which
    takes longer than the rest of a tiny step."""

    requires_grad = True

    def __init__(self, value: torch.Tensor, parameter: torch.nn.Parameter, slope: torch.Tensor) -> None:
        self._value = value
        self._parameter = parameter
        self._slope = slope

    def dim(self) -> int:
        return 0

    def detach(self) -> torch.Tensor:
        return self._value

    def backward(self) -> None:
        self._parameter.grad = self._slope.clone()

    def __mul__(self, factor: float) -> KnownLoss:
        return KnownLoss(self._value * factor, self._parameter, self._slope * factor)


class TinyTask:
    """The cheapest task there is: three numbers, a loss that is linear in them, a batch that is its own number."""

    BATCH = 4
    UNITS, SAMPLES = 64, 64
    SLOPES = [torch.tensor([1.0, -0.5, 0.1 * number]) for number in range(7)]
    """Gradients by the remainder of a batch's number."""

    def __init__(self) -> None:
        self.model = torch.nn.Module()
        self._numbers = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
        self.model.register_parameter("numbers", self._numbers)

    def num_units(self) -> int:
        return self.UNITS

    def unit_samples(self, data_pass: int, unit_index: int) -> int:
        return self.SAMPLES

    def batch(self, data_pass: int, unit_index: int, start: int, count: int) -> tuple[int, int]:
        return unit_index * self.SAMPLES + start, count

    def batch_tokens(self, batch: tuple[int, int]) -> int:
        return batch[1]

    def loss(self, batch: tuple[int, int]) -> KnownLoss:
        slope = self.SLOPES[batch[0] % len(self.SLOPES)]
        return KnownLoss(torch.dot(self._numbers.detach(), slope), self._numbers, slope)

    def held_out_loss(self) -> float:
        return float(self.loss((0, 1)).detach())
