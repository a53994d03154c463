"""The view of an attacker of one record of private SGD: what it sees and knows, and what gradients tell.

The attacker has the parameters after each step, and so every noisy sum. It knows all other records and which of them
took part, the label and the settings. After it has subtracted the other records' clipped gradients,

    r_t = b_t u_t(z) + σC ξ_t,      u_t(z) = c g(z; w_t),   b_t ~ Bernoulli(q),   ξ_t ~ N(0, I)

It may know in which steps the record took part (b) or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, jacfwd, vmap

from reconbound._internal.checks import InputError
from reconbound.accounting.amplification import poisson_factors
from reconbound.divergences import poisson_kl, poisson_pair_kl
from reconbound.fisher import clipping
from reconbound.fisher.reference import load_forward_mode
from reconbound.training.settings import Settings
from reconbound.training.trajectory import Trajectory
from reconbound.validate.private import Private, Problem

#: Floats in one array of Jacobians: on a CPU it then stays in the cache, a GPU needs much to do at once.
FLOATS, GPU_FLOATS = 1_000_000, 100_000_000
LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, repr=False)
class Transcript:
    """Holds what the attacker of one record has seen of M trainings, after it subtracted what it knows.

    Attributes:
        params: before each step, (M, T, p).
        left: the noisy sums minus the other records' clipped gradients, (M, T, p).
        scale: σC.
        rate: q, the chance that the record took part in a step; 1 where the attacker knows in which it did.
        present: of an attacker who knows in which steps the record took part: those, as 1 and 0, (M, T); the others
            tell nothing. None: it does not know.
    """

    params: Tensor
    left: Tensor
    scale: float
    rate: float
    present: Tensor | None = None

    def __repr__(self) -> str:
        """Returns only sizes: the values are secret, and long."""
        trainings, steps, _ = self.left.shape
        known = "unknown" if self.present is None else "known"
        return f"Transcript({trainings} trainings, {steps} steps, participation {known}; confidential)"

    def __len__(self) -> int:
        return len(self.left)

    def of(self, trainings: Any) -> Transcript:
        """Returns the transcript of some of the trainings.

        Args:
            trainings: their indices, or a slice.
        """
        present = None if self.present is None else self.present[trainings]
        return replace(self, params=self.params[trainings], left=self.left[trainings], present=present)


@dataclass(frozen=True, repr=False)
class SGDKnowledge:
    """Holds what an attacker of private SGD knows of the record that it attacks, and of the training.

    Attributes:
        model: that is trained; its parameters do not matter.
        loss_fn: (outputs, targets) → one loss per record.
        settings: of the training.
        label: the record's target, (1, …).
        like: an input of the record's shape, (1, …): what is public of the record is as in the record, what is private
            is not used.
        private: flat indices of the private features; None for all.
        mean: what the attacker expects of the private features, (d,): here its search begins.
        root: R with R Rᵀ the covariance of what it expects, (d, k); None for an attacker without outside knowledge.
    """

    model: nn.Module
    loss_fn: LossFn
    settings: Settings
    label: Tensor
    like: Tensor
    private: Tensor | None = None
    mean: Tensor | None = None
    root: Tensor | None = None

    def __post_init__(self) -> None:
        load_forward_mode()
        if len(self.like) != 1 or len(self.label) != 1:
            raise InputError("like", "and label must be of one record, (1, …)", (len(self.like), len(self.label)))
        for name, value in (("mean", self.mean), ("root", self.root)):
            if value is not None and len(value) != self.features:
                raise InputError(name, f"must have {self.features} rows, one for each private feature", len(value))

    @property
    def features(self) -> int:
        """Returns d, the number of private features."""
        return self.like[0].numel() if self.private is None else len(self.private)

    @cached_property
    def start(self) -> Tensor:
        """Returns where a search begins, (d,): what the attacker expects, or 0."""
        return self.like.new_zeros(self.features) if self.mean is None else self.mean.to(self.like)

    @cached_property
    def _shapes(self) -> list[tuple[str, torch.Size]]:
        return [(name, p.shape) for name, p in self.model.named_parameters() if p.requires_grad]

    def without_prior(self) -> SGDKnowledge:
        """Returns the knowledge of an attacker without outside knowledge; its search begins at the same place."""
        return replace(self, root=None)

    def private_part(self, inputs: Tensor) -> Tensor:
        """Returns the private features of records, (B, d).

        Args:
            inputs: of the records, (B, …).
        """
        flat = inputs.reshape(len(inputs), -1)
        return flat if self.private is None else flat[:, self.private]

    def _gradient(self, z: Tensor, w: Tensor) -> Tensor:
        """Returns the clipped gradient of a record with private features z at parameters w, (p,)."""
        flat = self.like.flatten()
        whole = z if self.private is None else flat.index_put((self.private,), z)
        problem, at, params = Problem(self.model, self.loss_fn, Private()), 0, {}
        for name, shape in self._shapes:
            size = math.prod(shape)
            params[name] = w[at : at + size].reshape(shape)
            at += size
        given = whole.reshape(self.like.shape)
        found = grad(lambda own: problem.losses(given, self.like, self.label, own)[0])(params)
        g = torch.cat([v.flatten() for v in found.values()])
        return clipping(torch.linalg.vector_norm(g), self.settings.max_grad_norm, self.settings.clip).factor * g

    @cached_property
    def gradients(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns the function (z (M, d), params (M, T, p)) → clipped gradients u, (M, T, p)."""
        return vmap(vmap(self._gradient, in_dims=(None, 0)))

    def gradients_at(self, params: Tensor, z: Tensor) -> Tensor:
        """Returns the clipped gradients at all steps of M trainings, (M, T, p), computed in blocks.

        Args:
            params: before each step, (M, T, p).
            z: private features, (d,) or (M, d); or these gradients themselves, (M, T, p), if they are known already.
        """
        if z.dim() == 3:
            return z
        whole = z.expand(len(params), -1)
        return torch.cat([self.gradients(whole, params[:, rows]) for rows in _blocks(params)], dim=1)

    @cached_property
    def _moved(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Returns the function (z (M, d), params (M, T, p), root (d, k)) → ∂u/∂c for z + root·c, (M, T, p, k)."""

        def one(z: Tensor, w: Tensor, root: Tensor) -> Tensor:
            found: Tensor = jacfwd(lambda c: self._gradient(z + root @ c, w))(z.new_zeros(root.shape[1]))
            return found

        return vmap(vmap(one, in_dims=(None, 0, None)), in_dims=(0, 0, None))

    def steps_of(self, seen: Transcript, columns: int) -> Iterator[slice]:
        """Yields slices of steps whose Jacobians fit into memory for all trainings of the transcript.

        Args:
            seen: the transcript.
            columns: of the Jacobians.
        """
        trainings, steps, size = seen.left.shape
        count = max(1, floats_at_once(seen.left) // max(1, trainings * size * columns))
        for at in range(0, steps, count):
            yield slice(at, min(at + count, steps))

    def likelihood(self, seen: Transcript, z: Tensor, root: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns −ln of the likelihood at z up to a constant, its negative slope and the Gauss–Newton curvature.

            −Σ_t log(1 − q + q e^{a_t}),      a_t = (2⟨r_t, u_t⟩ − ‖u_t‖²)/(2s²)
            slope Σ_t π_t (J R)ᵀ(r_t − u_t)/s²,   curvature Σ_t π_t (J R)ᵀ J R/s²

        π_t is the chance that the record took part in step t, given what is seen.

        Args:
            seen: the transcript of M trainings.
            z: private features, (M, d).
            root: R, directions in which z may move, (d, k).
            scale: s of each training, (M,); larger than σC while a search begins far away.

        Returns:
            Shapes (M,), (M, k) and (M, k, k).
        """
        k, count = root.shape[1], len(z)
        loss, slope, bend = z.new_zeros(count), z.new_zeros(count, k), z.new_zeros(count, k, k)
        for rows in self.steps_of(seen, k):
            w, left = seen.params[:, rows], seen.left[:, rows]
            u, jacobian = self.gradients(z, w), self._moved(z, w, root)
            terms, took = self._terms(seen, u, left, rows, scale)
            weight = (took.sqrt() / scale[:, None])[:, :, None]
            away = (weight * (left - u)).flatten(1)
            jacobian = jacobian.mul_(weight[..., None]).flatten(1, 2)
            loss -= terms.sum(1)
            slope += (away[:, None] @ jacobian)[:, 0]
            bend += jacobian.mT @ jacobian
        return loss, slope, bend

    def log_ratio(self, seen: Transcript, z: Tensor) -> Tensor:
        """Returns ln of the likelihood with the record z over that without it, (M,).

        Args:
            seen: the transcript of M trainings.
            z: private features, (d,) or (M, d), or their gradients; see `gradients_at`.
        """
        u = self.gradients_at(seen.params, z)
        found, scale = u.new_zeros(len(seen)), u.new_full((len(seen),), seen.scale)
        for rows in self.steps_of(seen, 1):
            found += self._terms(seen, u[:, rows], seen.left[:, rows], rows, scale)[0].sum(1)
        return found

    def _terms(self, seen: Transcript, u: Tensor, left: Tensor, rows: slice, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log(1 − q + q e^{a}) of each step, (M, T), and π."""
        a = ((left * u).sum(2) - u.square().sum(2) / 2) / scale[:, None].square()
        if seen.present is not None:
            present = seen.present[:, rows].to(a)
            return a * present, present
        if seen.rate == 1:
            return a, torch.ones_like(a)
        out, taken = math.log1p(-seen.rate), math.log(seen.rate) + a
        return torch.logaddexp(torch.full_like(a, out), taken), torch.sigmoid(taken - out)

    # --- what the steps tell, for whoever knows the record ---------------------------------

    def information(self, seen: Transcript, z: Tensor) -> Tensor:
        """Returns the Fisher information of the steps about the private features, its mean over trainings, (d, d).

            Σ_t q/s² Jᵀ[k⊥(1 − ûûᵀ) + k∥ûûᵀ]J      (participation known: Σ_t b_t JᵀJ/s²)

        Args:
            seen: the transcript of M trainings.
            z: the record's private features, (d,).
        """
        d, whole = self.features, z.expand(len(seen), -1)
        total = z.new_zeros(d, d, dtype=torch.float64)
        root = torch.eye(d, dtype=z.dtype, device=z.device)
        for rows in self.steps_of(seen, d):
            w = seen.params[:, rows]
            u, jacobian = self.gradients(whole, w), self._moved(whole, w, root)
            norm = torch.linalg.vector_norm(u, dim=2)
            if seen.present is None:
                factors = poisson_factors((norm / seen.scale).double().cpu().numpy(), seen.rate)
                across, along = (torch.from_numpy(np.asarray(k)).to(u) * seen.rate for k in factors)
            else:
                across = along = seen.present[:, rows].to(u)
            unit = torch.where(norm > 0, 1 / norm, 0)[:, :, None] * u
            h = torch.einsum("mtp,mtpk->mtk", unit, jacobian)
            flat = (across[:, :, None, None] * jacobian).flatten(0, 2)
            total += (flat.T @ jacobian.flatten(0, 2)).double()
            total += (((along - across)[:, :, None] * h).flatten(0, 1).T @ h.flatten(0, 1)).double()
        return total / (len(seen) * seen.scale**2)

    def nats(self, seen: Transcript, z: Tensor, other: Tensor | None = None) -> Tensor:
        """Returns Σ_t k_q at the parameters of each training, (M,): its mean over trainings with z is D.

        Args:
            seen: the transcript of M trainings.
            z: the record's private features, (d,) or (M, d), or their gradients; see `gradients_at`.
            other: those of the other world, likewise; None: the record is left out there.
        """
        u, rate = self.gradients_at(seen.params, z), self.settings.sample_rate
        v = None if other is None else self.gradients_at(seen.params, other)
        found = torch.zeros(len(seen), dtype=torch.float64, device=u.device)
        for rows in self.steps_of(seen, 2):
            a = u[:, rows].double() / seen.scale
            if v is None:
                found += poisson_kl(a.norm(dim=2), rate).sum(1)
                continue
            b = v[:, rows].double() / seen.scale
            apart = (a - b).square().sum(2)
            found += poisson_pair_kl(a.norm(dim=2), b.norm(dim=2), (a * b).sum(2), rate, squared_distance=apart).sum(1)
        return found


def transcript_of(
    released: Trajectory, known: SGDKnowledge, record: int, own: Tensor | None, *, participation: bool = False
) -> Transcript:
    """Returns the attacker's view of a record: the release, after it subtracted all other records.

    The others' sum is computed as the sum before noise minus the record's own part, which is the same.

    Args:
        released: the trajectory of M trainings, with sums before noise.
        known: what the attacker knows.
        record: the index of the record.
        own: the private features that the record really had in these trainings, (d,) or (M, d), or their gradients
            (see `SGDKnowledge.gradients_at`); None: it was left out. They only serve to compute the others' sum.
        participation: whether the attacker knows in which steps the record took part.
    """
    if released.clean is None:
        raise InputError("released", "must have the sums before noise: see with_clean_sums", None)
    settings, left = known.settings, released.sums - released.clean
    took = released.took_part(record)
    if own is not None:
        left.addcmul_(took[:, :, None].to(left), known.gradients_at(released.params, own))
    scale = settings.noise_multiplier * settings.max_grad_norm
    if not participation:
        return Transcript(released.params, left, scale, settings.sample_rate)
    most = max(1, int(took.sum(1).max()))
    order = took.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]  # steps with the record first
    present = took.gather(1, order).to(left)
    wide = order[:, :, None].expand(-1, -1, left.shape[2])
    return Transcript(released.params.gather(1, wide), left.gather(1, wide), scale, 1.0, present)


def floats_at_once(like: Tensor) -> int:
    """Returns the number of floats in one array of Jacobians on a tensor's device."""
    return FLOATS if like.device.type == "cpu" else GPU_FLOATS


def _blocks(left: Tensor) -> Iterator[slice]:
    trainings, steps, size = left.shape
    count = max(1, floats_at_once(left) // max(1, trainings * size))
    yield from (slice(at, at + count) for at in range(0, steps, count))
