"""Checks of every draw of fuzz_models.py. Each returns the faults that it found, as text."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fuzz_models import Draw
from measuring import measure, sum_clipped
from reconbound.fisher import Private, dense_information, sensitivity
from reconbound.fisher.sums import covering_method
from reconbound.validate import ModelError
from reconbound.validate.private import Problem, as_private, batch_rows, private_part, trainable
from reconbound.validate.watch import converted

NEVER = 1e30  # a clip norm that no gradient reaches
REFUSALS = (ValueError, ModelError)


class Tally:
    """Counts of draws, refusals and checks, and the worst ratio of a contribution to sensitivity · C, by dtype."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.worst: dict[str, float] = {}

    def ratio(self, dtype: str, value: float) -> None:
        self.worst[dtype] = max(self.worst.get(dtype, 0.0), value)

    def __str__(self) -> str:
        lines = [f"{n:7d} {what}" for what, n in sorted(self.counts.items())]
        lines += [f"{n:7d} refused: {what}" for what, n in self.refusals.most_common()]
        return "\n".join(
            [*lines, *(f"worst contribution / (sensitivity C), {k}: {v:.9f}" for k, v in self.worst.items())]
        )


def check_draw(draw: Draw, tally: Tally) -> list[str]:
    """Returns what is wrong with the sums and the information of a draw."""
    for tag in ("draws", *draw.tags):
        tally.counts[tag] += 1
    before = torch.get_rng_state()
    faults: list[str] = []
    try:
        faults += _check_sums(draw, tally)
        faults += _check_traces(draw, tally)
    except REFUSALS as refusal:
        word = " ".join(w for w in str(refusal).split() if not any(c.isdigit() for c in w))[:70]
        tally.refusals[word] += 1
        if not str(refusal):
            faults.append("a refusal without a word")
        correct = any(words in str(refusal) for words in ("does not depend on", "has no trainable parameters"))
        # scores of attention multiply two weights and two values: with such numbers a softmax or a sigmoid is a step at
        # the resolution of float64 too (draw 914684: the loss changes by 8 within 2e-12 of the segment)
        correct |= _largest(draw) ** 2 > 1000 and "jumps with the private part" in str(refusal)
        # PyTorch's second derivative of LayerNorm fails under vmap where only parameters reach the loss (draw 2101791)
        correct |= draw.method == "generic" and "torch.func cannot take it record by record" in str(refusal)
        if draw.dtype == torch.float64 and not correct and _finite(draw):
            faults.append(f"refused, but finite in float64: {refusal}")
    except Exception as error:
        faults.append(f"{type(error).__name__}: {str(error)[:300]}")
    if not torch.equal(before, torch.get_rng_state()):
        faults.append("the global generator was used")
    return faults


def _largest(draw: Draw) -> float:
    """Returns the size of the largest number among the parameters and the data."""
    numbers = [*draw.model.parameters(), *(x for x in tree_leaves(draw.inputs) if isinstance(x, Tensor))]
    return max(float(x.detach().double().abs().max()) for x in numbers if x.numel())


def _check_sums(draw: Draw, tally: Tally) -> Iterator[str]:
    name = draw.tags[0]
    bound = sensitivity(draw.clip) * draw.max_grad_norm
    whole = clipped(draw)
    records = len(whole.norm)
    if not all(bool(torch.isfinite(s).all()) for s in whole.gradient_sum.values()):
        yield "a sum that is not finite"
    sizes = []
    for i in range(records):
        one = clipped(draw, slice(i, i + 1))
        sizes.append(size(one.gradient_sum))
        tally.counts["contributions"] += 1
        tally.ratio(name, sizes[-1] / bound)
        if not sizes[-1] <= bound * (1 + 1e-4):
            yield f"record {i} contributes {sizes[-1] / bound:.6g} of what it may ({one.norm.item():.4g} norm)"
        yield from _check_norm(draw, i, float(whole.norm[i]), tally)
        yield from _check_share(draw, i, float(whole.norm[i]), tally)
    # removal: what is left is summed in another order, with other partial sums
    unit = torch.finfo(whole.norm.dtype).eps
    for i in range(records if records > 1 else 0):
        keep = [j for j in range(records) if j != i]
        others = clipped(draw, keep)
        if bool((others.norm > 0).any()):
            yield from _check_choice(draw, i, keep, tally)
        moved = size({k: v.double() - others.gradient_sum[k].double() for k, v in whole.gradient_sum.items()})
        tally.counts["removals"] += 1
        allowed = bound * (1 + 1e-3) + 4 * unit * sum(sizes)
        if not moved <= allowed:
            if moved <= allowed + _rounding_of_others(draw, i):
                tally.counts["removals that autograd's rounding of the others excuses"] += 1
            else:
                yield f"without record {i} the sum moves by {moved / bound:.6g} of what it may"
    if draw.dtype == torch.float64:
        yield from _check_autograd(draw, tally)


def _rounding_of_others(draw: Draw, i: int) -> float:
    """Returns how far the clipped gradients of the others move as autograd rounds them in the batches without record i.

    A clip is a projection on a ball: it moves no gradient further than the gradient itself moved, nor 2C/n of that.
    """
    records, total = len(draw.targets), 0.0
    keep = [j for j in range(records) if j != i]
    for place, j in enumerate(keep):
        found = []
        for rows, at in ((list(range(records)), j), (keep, place)):
            step = draw.micro_batch or len(rows)
            start = at - at % step
            found.append(plain_gradients(draw, rows[start : start + step], double=False, only=at - start))
        off, norm = size({k: found[0][k] - found[1][k] for k in found[0]}), size(found[0])
        total += off * min(1.0, 2 * draw.max_grad_norm / max(norm, 1e-300))
    return total


def _check_norm(draw: Draw, i: int, norm: float, tally: Tally) -> Iterator[str]:
    """The norm is not below that of the float64 twin, where the gradient itself is well conditioned."""
    exact = plain_gradients(twin(draw), slice(i, i + 1), double=True)
    if draw.dtype == torch.float64:  # autograd would be compared with itself
        own = [plain_gradients(shake(draw, 1e-14), slice(i, i + 1), double=True)]
    else:  # alone, and among the records that it is computed with: one rounding may be lucky
        size_of = draw.micro_batch or len(draw.targets)
        beside = slice(i - i % size_of, i - i % size_of + size_of)
        own = [plain_gradients(draw, slice(i, i + 1), double=False)]
        own.append(plain_gradients(draw, beside, double=False, only=i % size_of))
    true = size(exact)
    error = max(size({k: g[k] - exact[k] for k in exact}) for g in own)
    if not math.isfinite(true) or not error <= 0.05 * true:
        return
    tally.counts["norms"] += 1
    coarsest = torch.bfloat16 if "Mixed" in draw.tags else draw.dtype
    least = true * (1 - max(1e-12, 16 * torch.finfo(coarsest).eps))
    if norm < least - 3 * error and norm < least - 3 * _usual_error(draw, i):
        yield f"record {i} has norm {norm:.9g}, in float64 {true:.9g} (autograd is off by {error:.3g})"


def _usual_error(draw: Draw, i: int) -> float:
    """Returns the largest error of autograd's gradient of a record over 16 draws that differ in their last digits.

    How far the exact gradient moves with these digits counts too: no computation in this precision can do better.
    """
    errors = []
    true = plain_gradients(twin(draw), slice(i, i + 1), double=True)
    for seed in range(16):
        near = shake(draw, 4 * torch.finfo(draw.dtype).eps, seed, draw.dtype)
        own = plain_gradients(near, slice(i, i + 1), double=False)
        exact = plain_gradients(twin(near), slice(i, i + 1), double=True)
        errors.append(max(size({k: own[k] - other[k] for k in other}) for other in (exact, true)))
    return max(errors)


def _check_share(draw: Draw, i: int, norm: float, tally: Tally) -> Iterator[str]:
    """The norm is not below that of the record's share of the sum of the same batch, which is what is clipped.

    Norms below the smallest normal number have few digits. No clip norm can be that small, so none of them is clipped.
    """
    one = torch.zeros(len(draw.targets))
    one[i] = 1
    share = size(clipped(draw, max_grad_norm=NEVER, clip="hard", mask=one).gradient_sum)
    tally.counts["shares"] += 1
    least = torch.finfo(torch.promote_types(draw.dtype, torch.float32)).tiny
    if not norm >= share * (1 - 1e-12) and least < share < NEVER:
        yield f"record {i} has norm {norm:.9g}, but its share of the sum has {share:.9g}"


def _check_choice(draw: Draw, i: int, keep: list[int], tally: Tally) -> Iterator[str]:
    """The method is the same with and without a record, or the sum of the others is the same by both methods.

    Two methods round the shares of all others differently. But where the others are alike to the last digit, nothing
    shows whose rows their gradients are in, and it makes no difference.
    """
    if draw.method != "auto" or ("Turned" in draw.tags and len(keep) == 1):  # one record alone cannot be turned
        return
    tally.counts["choices of a method"] += 1
    batches = (draw.inputs, draw.targets), chosen((draw.inputs, draw.targets), keep)
    methods = [covering_method(draw.model, draw.loss_fn, *batch, Private("nothing")) for batch in batches]
    tally.counts[f"choices of {methods[0]}"] += 1
    if len(set(methods)) > 1:
        own, other = (clipped(draw, keep, method=method).gradient_sum for method in ("auto", "generic"))
        off = size({k: own[k].double() - other[k].double() for k in own})
        if off > 1e-3 * sensitivity(draw.clip) * draw.max_grad_norm:
            yield f"without record {i} another method covers the model"


def _check_autograd(draw: Draw, tally: Tally) -> Iterator[str]:
    """Without a clip the sum is that of autograd, up to its rounding.

    Moving all numbers by 1e-14 shows that, and autograd's gradients of single records: where the places of a record
    cancel, a sum over all of them rounds otherwise.
    """
    whole = clipped(draw, max_grad_norm=1e150, clip="hard", mask=None)  # outliers' gradients reach 1e38
    plain = plain_gradients(draw, slice(None), double=True)
    shaken = (plain_gradients(shake(draw, 1e-14, seed), slice(None), double=True) for seed in range(1, 9))
    single = [plain_gradients(draw, slice(i, i + 1), double=True) for i in range(len(draw.targets))]
    added = {k: torch.stack([one[k] for one in single]).sum(0) for k in plain}
    noise = max(size({k: one[k] - plain[k] for k in plain}) for one in (*shaken, added))  # one of them may be lucky
    off = size({k: whole.gradient_sum[k].double() - plain[k] for k in plain})
    tally.counts["sums against autograd"] += 1
    if not off <= 1e-9 * float(whole.norm.sum()) + 100 * noise:
        yield f"the sum without a clip is off by {off / max(size(plain), 1e-300):.3g} of autograd's (noise {noise:.3g})"


def _check_traces(draw: Draw, tally: Tally) -> Iterator[str]:
    z = private_part(Problem(draw.model, draw.loss_fn, as_private(draw.private)), draw.inputs, draw.targets)
    features = z[0].numel()
    if features > 40:
        return
    bound = sensitivity(draw.clip) * draw.max_grad_norm
    found = information(draw, z) if draw.dtype in (torch.float64, torch.float32) else information(draw, z, slice(None))
    for i in range(len(found.norm)):
        one = information(draw, z, slice(i, i + 1))
        mine = size(one.gradient_sum) / bound
        tally.counts["contributions of measured steps"] += 1
        tally.ratio(draw.tags[0], mine)
        if not mine <= 1 + 1e-4:
            yield f"record {i} contributes {mine:.6g} of what it may (measured)"
    if draw.dtype in (torch.float64, torch.float32):
        yield from _check_information(draw, found, tally)


def _check_information(draw: Draw, found: Any, tally: Tally) -> Iterator[str]:
    """Along and across are those of dense Jacobians of the float64 twin."""
    precise = draw.dtype == torch.float64
    exact, shaken = dense(twin(draw)), dense(shake(twin(draw), 1e-14 if precise else 2.0**-22))
    free = dense(twin(draw), max_grad_norm=NEVER, noise_multiplier=1 / NEVER, clip="hard")  # J itself
    factor = found.factor.double() / draw.max_grad_norm
    wide = twin(draw)
    z = private_part(Problem(wide.model, wide.loss_fn, as_private(wide.private)), wide.inputs, wide.targets)
    reach = [float(torch.linalg.vector_norm(row)) for row in z]
    present = torch.ones_like(factor) if draw.mask is None else draw.mask.to(factor)
    for i in range(len(factor)):
        n = float(exact.norm[i])
        near_kink = draw.clip == "hard" and abs(n / draw.max_grad_norm - 1) < 1e-5
        if not present[i] or near_kink or not math.isfinite(float(free.trace[i] * factor[i] ** 2)):
            continue
        whole = float(free.trace[i] * factor[i] ** 2)
        least = (1e-12 if precise else 1e-5) * n * float(factor[i])  # of the gradient's own rounding
        if whole * reach[i] ** 2 < least**2 or not (precise or _conditioned(draw, i)) or _sure(draw, i):
            continue
        for part in ("along", "across"):
            want, got = float(getattr(exact, part)[i]), float(getattr(found, part)[i])
            noise = abs(want - float(getattr(shaken, part)[i]))
            above = abs(float(found.norm[i]) / n - 1) if n else 0.0  # norms are rounded up where places cancel
            if precise:
                tally.counts[f"{part} in float64"] += 1
                allowed = 1e-5 * want + (1e-7 + 4 * above) * whole + 100 * noise
            else:
                if noise > 0.01 * whole or not 1e-30 < whole < 1e30:
                    continue
                tally.counts[f"{part} in float32"] += 1
                allowed = 0.1 * (want + whole)
                if above > 0.1:  # a part of what is along g counts as across: docs/theory/fisher.md
                    want, got = float(exact.trace[i]), float(found.trace[i])
            if not abs(want - got) <= allowed:
                yield f"record {i}: {part} is {got:.9g}, dense {want:.9g} (whole {whole:.3g}, noise {noise:.3g})"


def _conditioned(draw: Draw, i: int) -> bool:
    """Returns whether autograd's derivatives of a record in float32 agree with float64: not for a softmax near 1.

    Nor do those before a saturated activation, in the gradient or in its derivative by the private part only. The
    information may come from these parameters only, so each counts by itself.
    """
    if "Mixed" in draw.tags:  # bfloat16 inside
        return False
    exact = plain_gradients(twin(draw), slice(i, i + 1), double=True)
    own = plain_gradients(draw, slice(i, i + 1), double=False)
    if any(size({k: own[k] - exact[k]}) > 0.01 * size({k: exact[k]}) for k in exact):
        return False
    wide, narrow = plain_jacobian(twin(draw), i), plain_jacobian(draw, i)
    return bool((narrow - wide).norm() <= 0.01 * wide.norm())


def _sure(draw: Draw, i: int) -> bool:
    """Returns whether a softmax is so near 1 that 1 − p has few digits: its derivatives are then only rounding."""
    if {"Attention", "Heads"} & set(draw.tags):
        numbers = [t for t in tree_leaves((draw.inputs, list(draw.model.parameters()))) if t.is_floating_point()]
        if math.prod(sorted(float(t.detach().double().abs().max()) for t in numbers if t.numel())[-2:]) > 30:
            return True
    if draw.targets.is_floating_point() and draw.targets.dim() == 1:
        return False
    wide = twin(draw)
    inputs = batch_rows(wide.inputs, slice(i, i + 1))
    with torch.no_grad():
        out = wide.model(**inputs) if isinstance(inputs, dict) else wide.model(*_as_tuple(inputs))
    values = out.flatten().sort(descending=True).values
    return float(values[0] - values[1]) > (20.0 if draw.dtype == torch.float64 else 8.0)


def _as_tuple(inputs: Any) -> tuple[Any, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)


def clipped(draw: Draw, rows: Any = None, **changed: Any) -> Any:
    """Returns the clipped sum of these rows; one row alone is counted whatever the mask says."""
    inputs, targets = (draw.inputs, draw.targets) if rows is None else chosen((draw.inputs, draw.targets), rows)
    mask = draw.mask if rows is None else None if isinstance(rows, slice) else chosen(draw.mask, rows)
    options: dict[str, Any] = {
        "max_grad_norm": draw.max_grad_norm,
        "clip": draw.clip,
        "micro_batch": draw.micro_batch,
        "mask": mask,
        "method": draw.method,
    }
    return sum_clipped(draw.model, draw.loss_fn, inputs, targets, **{**options, **changed})


def information(draw: Draw, z: Tensor, rows: slice | None = None) -> Any:
    """Returns the information of a step with a probe along each axis of the private part: then across is exact."""
    inputs, targets = (draw.inputs, draw.targets) if rows is None else chosen((draw.inputs, draw.targets), rows)
    features = z[0].numel()
    axes = torch.eye(features, dtype=z.dtype).reshape(features, *z.shape[1:]) * math.sqrt(features)
    if rows is not None:  # asked for its sum alone
        axes = axes[:1]
    return measure(
        draw.model,
        draw.loss_fn,
        inputs,
        targets,
        max_grad_norm=draw.max_grad_norm,
        noise_multiplier=1.0,
        clip=draw.clip,
        private=draw.private,
        method=draw.method,
        mask=draw.mask if rows is None else None,
        micro_batch=draw.micro_batch,
        probe="inputs",
        deflate=0,
        directions=list(axes),
        error="bound",
    )


def dense(draw: Draw, **changed: Any) -> Any:
    options = {"max_grad_norm": draw.max_grad_norm, "noise_multiplier": 1.0, "clip": draw.clip, "private": draw.private}
    return dense_information(draw.model, draw.loss_fn, draw.inputs, draw.targets, **{**options, **changed})


def chosen(tree: Any, rows: Any) -> Any:
    if isinstance(rows, slice):
        return batch_rows(tree, rows)
    return tree_map(lambda t: t[rows] if isinstance(t, Tensor) else t, tree)


def plain_jacobian(draw: Draw, i: int) -> Tensor:
    """Returns autograd's ∂g/∂z of a record in the draw's own precision, (parameters, features), as float64."""
    problem = Problem(draw.model, draw.loss_fn, as_private(draw.private))
    z = private_part(problem, draw.inputs, draw.targets)[i]
    params = {name: p.detach() for name, p in trainable(problem).items()}
    inputs, targets = batch_rows((draw.inputs, draw.targets), slice(i, i + 1))

    def gradient(z: Tensor) -> Tensor:
        g = torch.func.grad(lambda w: problem.losses(z.unsqueeze(0), inputs, targets, w)[0])(params)
        return torch.cat([part.flatten() for part in g.values()])

    return torch.func.jacrev(gradient)(z).flatten(1).double()


def twin(draw: Draw) -> Draw:
    """Returns the draw in float64: the same numbers, and no rounding of what is made of them."""
    wide = copy.copy(draw)
    wide.model = copy.deepcopy(draw.model).double()
    wide.inputs, wide.targets = tree_map(_double, (draw.inputs, draw.targets))
    return wide


def shake(draw: Draw, amount: float, seed: int = 1, dtype: torch.dtype = torch.float64) -> Draw:
    """Returns the draw with every number moved by a relative amount, in float64, to see what rounding can do."""
    generator = torch.Generator().manual_seed(seed)
    moved = twin(draw)
    move = lambda t: t * (1 + amount * torch.randn(t.shape, generator=generator, dtype=t.dtype))  # noqa: E731
    with torch.no_grad():
        for p in moved.model.parameters():
            p.copy_(move(p))
    moved.inputs = tree_map(lambda t: move(t) if isinstance(t, Tensor) and t.is_floating_point() else t, moved.inputs)
    if dtype != torch.float64:
        moved.model = moved.model.to(dtype)
        moved.inputs, moved.targets = tree_map(lambda x: converted(x, dtype), (moved.inputs, moved.targets))
    return moved


def plain_gradients(draw: Draw, rows: slice | list[int], *, double: bool, only: int | None = None) -> dict[str, Tensor]:
    """Returns autograd's gradient of the summed losses of these rows, by parameter name, in float64.

    only: take the loss of this row, computed together with the others.
    """
    problem = Problem(draw.model, draw.loss_fn, Private("nothing"))
    params = trainable(problem)
    inputs, targets = chosen((draw.inputs, draw.targets), rows)
    with torch.enable_grad():
        losses = problem.losses(torch.zeros(len(targets)), inputs, targets)
        losses = losses if only is None else losses[only]
        found = (
            torch.autograd.grad(
                losses.double().sum() if double else losses.sum(), list(params.values()), allow_unused=True
            )
            if losses.requires_grad
            else [None] * len(params)
        )
    return {
        k: torch.zeros_like(p, dtype=torch.float64) if g is None else g.double()
        for (k, p), g in zip(params.items(), found, strict=True)
    }


def size(gradients: dict[str, Tensor]) -> float:
    """Returns the norm of all gradients together, without overflow."""
    flat = [g.detach().double().flatten() for g in gradients.values()]
    return float(torch.linalg.vector_norm(torch.cat(flat))) if flat else 0.0


def _finite(draw: Draw) -> bool:
    gradients = [plain_gradients(draw, slice(i, i + 1), double=True) for i in range(len(draw.targets))]
    return all(math.isfinite(size(g)) and size(g) < 1e150 for g in gradients)


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
