"""The Fisher information that one clipped, noisy gradient gives about each record of a batch, without Jacobians.

With n = ‖g‖, ĝ = g/n, h = Jᵀĝ and P = I − ĝĝᵀ, the clipped gradient c(n) g has the Jacobian
J̃ = [c P + (c + c'n) ĝĝᵀ] J, so

    J̃ᵀJ̃ = c² JᵀPJ + (c + c'n)² hhᵀ

The second term (along the gradient) is computed exactly; the first (across it) is estimated with Gaussian probes u
shared by the batch: r = Jᵀu − ⟨ĝ, u⟩ h = JᵀPu has E[rrᵀ] = JᵀPJ; or with probes v in the private part,
E‖PJv‖² = Tr JᵀPJ, whose variance is smaller because their basis can be chosen (probes.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from reconbound._internal.checks import number
from reconbound._internal.opacus_hooks import without_hooks
from reconbound._internal.rng import random_states_kept
from reconbound.fisher import options as given
from reconbound.fisher.clipping import Clip, Clipping
from reconbound.fisher.passes.products import squares, zero_sums
from reconbound.fisher.probes import Basis, draw_input_probes, draw_probes
from reconbound.fisher.sums import Pass, as_present, has_flat_record, micro_batches, open_pass
from reconbound.validate import private as problems
from reconbound.validate.jumps import check_jumps_once
from reconbound.validate.model import NOT_CHECKED, known_caveats

_MISSED = 1e-6  # chance that a step's bound of a record's spectral norm fails


@dataclass(frozen=True, repr=False)
class StepInformation:
    """The information that one step gives about each record of the batch, in units of 1/(private part)².

    Every per-record tensor has shape (B,), every per-feature tensor the shape of the private part, (B, ...). All are
    divided by (σC)², the variance of the noise on the sum. For a record that is known to take part in the step the
    information is `trace`; exact subsampling weights `across` and `along` by its two factors, and the diagonals alike.
    These numbers reveal single records: keep them as confidential as the records.

    Attributes:
        loss: ℓ, (B,).
        norm: n = ‖g‖, the gradient's norm before clipping, (B,).
        factor: c(n), (B,).
        clipped_norm: c(n) n, (B,).
        along: (c + c'n)² ‖h‖²/(σC)², the part along the gradient, exact, (B,).
        across: c² Tr JᵀPJ/(σC)², the part across it, estimated, (B,).
        across_error: the standard error of `across`, (B,).
        gradient_sum: Σ c g over the batch, by parameter name, each of the parameter's shape; no noise is on it.
        features: d, the number of private features of a record.
        probes: the number of probes that `across` is estimated from.
        diagonal_along: `along` for each feature, if requested, (B, ...).
        diagonal_across: `across` for each feature, if requested, (B, ...).
        diagonal_error: `across_error` for each feature, if requested, (B, ...).
        spectral: the largest eigenvalue of J̃ᵀJ̃/(σC)², by power iteration, from below, if requested, (B,).
        spectral_bound: above that eigenvalue, for each record with probability at least 1 − 1e-6 over the iteration's
            random start, (B,).
        mask: 1 for the records that took part, 0 for padding, (B,); None: all did. Padding is no measurement.
        noise_multiplier: the σ that it was computed for; a ledger refuses that of another mechanism.
        max_grad_norm: the clip norm that it was computed for, checked alike.
        clip: the clip that it was computed for, checked alike.
        part: what is private: "input", "target" or "module" (a module's output, whose range is not known).
        caveats: what must be stated with every floor computed from it; a ledger collects them.
    """

    loss: Tensor
    norm: Tensor
    factor: Tensor
    clipped_norm: Tensor
    along: Tensor
    across: Tensor
    across_error: Tensor
    gradient_sum: dict[str, Tensor]
    features: int
    probes: int
    diagonal_along: Tensor | None = None
    diagonal_across: Tensor | None = None
    diagonal_error: Tensor | None = None
    spectral: Tensor | None = None
    spectral_bound: Tensor | None = None
    noise_multiplier: float | None = None
    max_grad_norm: float | None = None
    clip: str | None = None
    mask: Tensor | None = None
    part: str = "input"
    caveats: tuple[str, ...] = (NOT_CHECKED,)

    def __repr__(self) -> str:
        """Returns only sizes: the values are secret, and long."""
        also = [name for name in ("diagonal", "spectral") if getattr(self, name) is not None]
        more = f", with {' and '.join(also)}" if also else ""
        probes = f"{self.probes} probe{'s' if self.probes != 1 else ''}"
        return f"StepInformation({len(self.loss)} records, {self.features} private features, {probes}{more})"

    @property
    def trace(self) -> Tensor:
        """Returns Tr J̃ᵀJ̃/(σC)², (B,). Its standard error is across_error: the part along the gradient has none."""
        return self.along + self.across

    @property
    def diagonal(self) -> Tensor | None:
        """Returns diag(J̃ᵀJ̃)/(σC)², how much each feature leaks, of the private part's shape."""
        if self.diagonal_along is None or self.diagonal_across is None:
            return None
        return self.diagonal_along + self.diagonal_across


def join(parts: Sequence[StepInformation]) -> StepInformation:
    """Returns the information about the records of several parts; facts about the mechanism are those of the first."""
    if len(parts) == 1:
        return parts[0]
    values: dict[str, Any] = {}
    for f in fields(StepInformation):
        pieces = [getattr(part, f.name) for part in parts]
        if isinstance(pieces[0], Tensor):
            values[f.name] = torch.cat(pieces)
        elif f.name == "gradient_sum":
            more = [piece for piece in pieces[1:] if piece]
            values[f.name] = {name: sum((p[name] for p in more), first) for name, first in pieces[0].items()}
    return replace(parts[0], **values)


@dataclass(frozen=True)
class _Plan:
    """The quantities to compute for each micro-batch."""

    setting: Mapping[str, Any]  # of every result: the mechanism, the private part, caveats
    options: given.StepOptions
    directions: Sequence[Any]  # of parameter space, by name, or of the private part
    features: Tensor | None
    start: Tensor | None  # of the power iteration


@random_states_kept()
def step_information(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: problems.Inputs,
    targets: Any,
    *,
    max_grad_norm: float,
    noise_multiplier: float,
    clip: Clip = "smooth",
    options: given.StepOptions = given.StepOptions(),
) -> StepInformation:
    """Returns the Fisher information that one noisy, clipped gradient sum gives about each record of a batch.

    I = J̃ᵀJ̃/(σC)²,   Tr I = [c² Tr JᵀPJ + (c + c'n)² ‖Jᵀĝ‖²]/(σC)²

    Args:
        model: any module that treats each record separately (no BatchNorm); its trainable parameters are what is
            released.
        loss_fn: (outputs, targets) → one loss per record, (B,).
        inputs: a tensor (B, ...), or a tuple or dictionary of such: model(x), model(*x) or model(**x).
        targets: what loss_fn takes, with B rows.
        max_grad_norm: the clip norm C.
        noise_multiplier: σ; the noise on the SUM of clipped gradients has standard deviation σC in each coordinate.
        clip: "smooth" or "hard".
        options: the private part, what else to compute, the random probes, micro-batches and method.

    The global generators of Python, NumPy and torch are left as they were: measuring never changes what is trained.

    Guarantee: `along` is exact; E[across] and E[diagonal_across] over the probes are exact for smooth models (twice
    differentiable at the record). The values hold for an attacker who knows everything but the record's private part,
    for a record that takes part in the step. A record with zero gradient has along = 0 and all its information across.

    >>> linear = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.ones_(linear.weight)      # loss (wx)²/2 at w = 1: g = x², J = 2x, all of it along the gradient
    >>> square, x = lambda out, target: out[:, 0] ** 2 / 2, torch.tensor([[0.5]])
    >>> info = step_information(linear, square, x, x, max_grad_norm=1.0, noise_multiplier=2.0, clip="hard")
    >>> [round(value.item(), 5) for value in (info.norm, info.along, info.across)]
    [0.25, 0.25, 0.0]
    """
    given.check_arguments(model, loss_fn, (inputs, targets), max_grad_norm, clip, options, given.StepOptions)
    number("noise_multiplier", noise_multiplier, above=0)
    probes = options.probes
    with without_hooks(model):
        problem = problems.Problem(model, loss_fn, problems.as_private(options.private))
        z = problems.private_part(problem, inputs, targets)
        records = z.shape[0]
        params = given.released(problem)
        features = problems.feature_mask(problem.private, z)
        setting: dict[str, Any] = {
            "features": math.prod(z.shape[1:]) if features is None else problem.private.count,
            "probes": probes.number,
            "noise_multiplier": noise_multiplier,
            "max_grad_norm": max_grad_norm,
            "clip": clip,
            "part": problem.private.part,
            "caveats": (*known_caveats(model), *problems.module_caveats(problem)),
        }
        if records == 0:  # a Poisson batch may be empty
            none = z.new_zeros(0)
            return StepInformation(none, none, none, none, none, none, none, zero_sums(params), **setting)
        checking = not (options.checked or given.capturing(z))
        if checking:
            given.check_values(model, inputs, targets)
            check_jumps_once(model, loss_fn, problems.batch_rows((inputs, targets), slice(0, 3)), problem.private)
        drawn: Sequence[Any]
        if probes.directions is not None:
            drawn = probes.directions
        elif options.probes_inputs:
            drawn = draw_input_probes(z, probes.count, probes.generator)
        else:
            drawn = draw_probes(params, probes.count, probes.generator)
        start = draw_input_probes(z, 1, probes.generator)[0] if options.spectral else None
        plan = _Plan(setting, options, drawn, features, start)
        present = None if options.mask is None else as_present(options.mask, z)
        sloped = options.probes_inputs and probes.deflate > 1
        slices, parts = list(micro_batches(records, options.micro_batch)), list[StepInformation]()
        check, method = not options.checked, options.method
        while len(parts) < len(slices):  # all are measured by one method, found on the first rows
            rows = slices[len(parts)]
            batch = problems.batch_rows((z, inputs, targets), rows)
            work = open_pass(problem, batch, method, check=check, sloped=sloped)
            if parts and work.method not in ("layers", method):  # only now it shows that records are mixed
                parts, check, method = [], not options.checked, work.method
                continue
            try:
                part = _measure(work, plan, None if present is None else present[rows])
            except RuntimeError as failure:
                raise given.explain_torch_error(failure) or failure from failure
            if parts:  # one sum is held, not one of each micro-batch
                for name, total in parts[0].gradient_sum.items():
                    total.add_(part.gradient_sum[name])
                part = replace(part, gradient_sum={})
            parts.append(part)
            if checking:
                given.check_overflow(parts[-1].norm, "gradient norm", "its gradient", rows.start)
                given.check_overflow(parts[-1].trace, "information", "the derivative of its gradient", rows.start)
            check = checking and check and has_flat_record(parts[-1].norm)
            method = method if check else work.method
        return replace(join(parts), mask=present)


def _measure(work: Pass, plan: _Plan, present: Tensor | None) -> StepInformation:
    options, max_grad_norm = plan.options, plan.setting["max_grad_norm"]
    in_inputs, error = options.probes_inputs, options.probes.resolved_error
    norm, pulled = work.own(moving=in_inputs or options.spectral > 0 or error == "product")
    inverse = torch.where(norm > 0, 1 / norm, 0)  # norms are not too small, so what is across is not too small either
    clips = Clipping(norm, max_grad_norm, plan.setting["clip"])
    scale = 1 / (plan.setting["noise_multiplier"] * max_grad_norm)
    c, radial = clips.factor * scale, clips.radial * scale
    if present is not None:
        c, radial = c * present, radial * present
    h = pulled * _like(inverse.clamp(max=torch.finfo(norm.dtype).max), pulled)
    h = _chosen(h, plan)
    residuals, values = _pushed(work, plan, h) if in_inputs else _probed(work, plan, h, inverse)
    across = (
        (values[0] if len(values) == 1 else torch.stack(values).mean(0)) * c * c
    )  # in float64: c² may be below 1e-38
    more: dict[str, Any] = {}
    if options.diagonal:
        more["diagonal_along"] = (_like(radial, h) * h).square()
        more["diagonal_across"] = torch.stack([(_like(c, h) * r).square() for r in residuals]).mean(0)
        more["diagonal_error"] = more["diagonal_across"] * math.sqrt(2 / (len(residuals) + 2))
    if options.spectral:
        more["spectral"], more["spectral_bound"] = _power(work, plan, h, c, radial)
    return StepInformation(
        loss=work.losses,
        norm=norm,
        factor=clips.factor,
        clipped_norm=clips.factor * norm,
        along=(squares(h) * radial * radial).to(norm.dtype),
        across=across.to(norm.dtype),
        across_error=_across_error(work, error, values, residuals, h, c, across).to(norm.dtype),
        gradient_sum=work.weighted_sum(clips.factor if present is None else clips.factor * present),
        **more,
        **plan.setting,
    )


def _probed(work: Pass, plan: _Plan, h: Tensor, inverse: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Returns r = Jᵀu − ⟨ĝ, u⟩h and ‖r‖², (B,), of each probe. All r are kept only when the diagonal needs them."""
    residuals: list[Tensor] = []
    values: list[Tensor] = []
    for u in plan.directions:
        dot, pulled = work.probe(u)
        r = _chosen(pulled, plan) - _like(dot * inverse, h) * h
        values.append(squares(r))
        residuals = [*residuals, r] if plan.options.diagonal else [r]
    return residuals, values


def _pushed(work: Pass, plan: _Plan, h: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Returns ‖PJv‖² = ‖Jv‖² − ⟨h, v⟩² of each probe v of the private part, (B,)."""
    deflate = plan.options.probes.deflate
    slope = work.slope if deflate > 1 else None
    third = work.output_slope() if deflate > 2 else None
    basis = Basis(
        h if deflate else None,
        None if slope is None else _chosen(slope, plan),
        None if third is None else _chosen(third, plan),
    )
    values: list[Tensor] = []
    for omega in plan.directions:
        v = basis.with_signs(_chosen(omega, plan), len(h))
        values.append((work.moved(v) - _inner(h, v).square()).clamp(min=0))
    return [], values


def _chosen(v: Tensor, plan: _Plan) -> Tensor:
    return v if plan.features is None else v * plan.features


def _across_error(
    work: Pass, error: str, values: list[Tensor], residuals: list[Tensor], h: Tensor, c: Tensor, across: Tensor
) -> Tensor:
    if error == "bound":
        return across * math.sqrt(2 / len(values))
    if error == "spread":
        return c.double().square() * torch.stack(values).std(0) / math.sqrt(len(values))
    r = residuals[-1] * _like(c, h)  # scaled first, so that nothing overflows
    squared = work.moved(r) - _inner(r, h).square()  # ‖PJr‖² = ‖Jr‖² − ⟨ĝ, Jr⟩²
    return c * (2 * squared.clamp(min=0) / len(values)).sqrt()


def _power(work: Pass, plan: _Plan, h: Tensor, c: Tensor, radial: Tensor) -> tuple[Tensor, Tensor]:
    """Returns bounds of the largest eigenvalue of M = c²JᵀJ + ((c + c'n)² − c²)hhᵀ from below and above.

    From below the Rayleigh quotient after the power iterations. From above, with k products from the start s ~ N(0, I)
    and λ's unit eigenvector u: ‖Mᵏs‖ ≥ λᵏ |⟨u, s⟩|, and |⟨u, s⟩| ≥ ε with probability at least 1 − ε √(2/π), so

        λ ≤ (‖Mᵏs‖/ε)^(1/k)      with probability at least 1 − δ,   ε = δ √(π/2)
    """
    assert plan.start is not None
    v = plan.start.expand_as(h).clone()
    extra = _like(radial.square() - c.square(), h)
    rho, products = torch.zeros_like(c), plan.options.spectral + 1
    logarithm = torch.zeros_like(c, dtype=torch.float64)  # of ‖Mᵏs‖, so far
    for _ in range(products):
        v = _chosen(v, plan)
        size = squares(v).sqrt()
        logarithm = logarithm + size.double().log()
        v = v * _like(torch.where(size > 0, 1 / torch.where(size > 0, size, 1), 0), v)
        image = _like(c.square(), h) * work.normal(v) + extra * h * _like((h * v).flatten(1).sum(1), h)
        image = _chosen(image, plan)
        rho = (image * v).flatten(1).sum(1)
        v = image
    logarithm = logarithm + squares(v).sqrt().double().log()
    least = math.log(_MISSED * math.sqrt(math.pi / 2))
    above = ((logarithm - least) / products).exp() * (1 + 100 * torch.finfo(c.dtype).eps)
    return rho, torch.maximum(above.to(c.dtype), rho)


def _inner(v: Tensor, w: Tensor) -> Tensor:
    """Returns the inner product of each record's parts, (B,), in float64."""
    return (v * w).flatten(1).sum(1, dtype=torch.float64)


def _like(per_record: Tensor, v: Tensor) -> Tensor:
    """Returns one number per record as a factor of v, in v's precision or float32."""
    return per_record.to(torch.promote_types(v.dtype, torch.float32)).reshape(-1, *(1,) * (v.dim() - 1))
