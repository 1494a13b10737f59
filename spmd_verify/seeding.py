"""Random state of one process: set it, keep it, put it back."""

import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor


def seed_all(seed: int) -> None:
    """Seed the generators a case may draw from: torch, `random` and numpy."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        # What `torch.manual_seed` does on a machine without other devices, less the stack
        # traces that it keeps for each kind of device it does not find: 0.4 ms.
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


@dataclass(frozen=True)
class RandomState:
    """The state of the three generators at one moment."""

    torch_state: Tensor
    python_state: Any
    numpy_state: Any

    @classmethod
    def now(cls) -> "RandomState":
        """Read the present state."""
        return cls(torch.get_rng_state(), random.getstate(), numpy.random.get_state())

    def restore(self) -> None:
        """Make this the present state again."""
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        numpy.random.set_state(self.numpy_state)
