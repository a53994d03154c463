"""Searches by damped Gauss–Newton steps, for many releases at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Steps at most.
ROUNDS = 60
#: A search ends where its next step is expected to gain less than this (values are −ln of likelihoods, and errors of an
#: answer in a direction about √(2·gain) of its standard error), or where its damping is above the largest.
GAIN, MOST_DAMPING = 1e-7, 1e12

#: (positions (m, k), their searches (m,)) → values (m,), negative slopes (m, k), curvatures (m, k, k).
Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def climb(
    evaluate: Evaluate, start: Tensor, *, far: float, rounds: int = ROUNDS, damping: float = 1e-3
) -> tuple[Tensor, Tensor]:
    """Returns where M functions are smallest near their starts, (M, k), and their values there, (M,).

    Levenberg and Marquardt's steps. A result is never worse than its start.

    Args:
        evaluate: computes value, negative slope and curvature of some of the functions.
        start: where the searches begin, (M, k).
        far: the largest length of a position.
        rounds: steps at most.
        damping: at the start, as a share of the curvature's mean diagonal.
    """
    k = start.shape[1]
    place, eye = start.clone(), torch.eye(k, dtype=start.dtype, device=start.device)
    live = torch.arange(len(start), device=start.device)
    value, slope, bend = evaluate(place, live)
    own = torch.full_like(value, damping)
    for _ in range(rounds):
        size = bend[live].diagonal(dim1=1, dim2=2).mean(1)
        level = (own[live] * size).clamp(min=torch.finfo(start.dtype).tiny ** 0.5)
        step = torch.linalg.solve_ex(bend[live] + level[:, None, None] * eye, slope[live])[0]
        step = torch.where(step.isfinite(), step, 0)
        tried = place[live] + step
        tried = tried * (far / tried.norm(dim=1, keepdim=True).clamp(min=far))
        new, new_slope, new_bend = evaluate(tried, live)
        better = new < value[live]
        small = (slope[live] * step).sum(1) <= GAIN
        won = live[better]
        place[won], value[won] = tried[better], new[better]
        slope[won], bend[won] = new_slope[better], new_bend[better]
        own[live] = torch.where(better, (own[live] / 10).clamp(min=1e-12), own[live] * 10)
        live = live[~small & (own[live] <= MOST_DAMPING)]
        if not len(live):
            break
    return place, value
