"""Copies to a GPU for which nothing waits."""

from __future__ import annotations

import torch
from torch import Tensor


def send(values: Tensor, device: torch.device) -> Tensor:
    """Returns the values on the device. A copy from main memory to a GPU is made while Python goes on.

    Args:
        values: where they are; not to be changed afterwards if they are in pinned memory.
        device: where they are needed.
    """
    if device.type == "cuda" and values.device.type == "cpu":  # from pageable memory it would wait for the device
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
