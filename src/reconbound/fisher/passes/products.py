"""Products with the weight gradients of single records, G = D Aᵀ, formed or not, whichever is less work (layers.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from reconbound.fisher.passes import convolutions
from reconbound.fisher.passes.layers import ConvRule, EmbeddingRule, Rule

Pair = tuple[Tensor, Tensor]
Params = Mapping[str, Tensor]
_FEW_PLACES = 4
#: The relative error of a float32 factor of a product, rounded or cut, by torch's names, new and old.
_SHORTENING = {"none": 0.0, "ieee": 0.0, "highest": 0.0, "tf32": 2.0**-10, "high": 2.0**-10}
_SHORTENING |= {"bf16": 2.0**-8, "medium": 2.0**-8}
_STRETCH = 256
_CANCELS = 1024.0  # how far the places of a record may cancel in a float32 sum over the batch
_FEW_ON_CUDA, _FEW_ON_CPU = 2**20, 2**16
_SMALL = 8192  # on CUDA a gradient of so few numbers is formed: cuDNN sums those that are not, slowly; they are joined


def precise(values: Tensor) -> Tensor:
    """Returns numbers in float64, in which products of float32 numbers are exact; indices are unchanged."""
    return values.double() if values.is_floating_point() else values


def gram(first: Tensor, second: Tensor) -> Tensor:
    """Returns the inner products of columns in float64, (B, g, L₁, L₂); for indices, True where they are equal.

    In float32 the sums that follow would cancel to nothing where the places of a record nearly cancel.
    """
    if not first.is_floating_point():
        return first.unsqueeze(3) == second.unsqueeze(2)
    same = first is second
    if same and first.shape[3] == 1:
        return squares(first.flatten(0, 1)).reshape(*first.shape[:2], 1, 1)
    first = precise(first)
    second = first if same else precise(second)
    if first.is_cuda and first.shape[3] * second.shape[3] <= _FEW_PLACES:  # a product of matrices that is slow there
        return (first.unsqueeze(4) * second.unsqueeze(3)).sum(2)
    return first.transpose(2, 3) @ second


def combined(vectors: Tensor, of_pairs: Tensor) -> Tensor:
    """Returns vectors (B, g, K, L₁) combined by a Gram matrix (B, g, L₁, L₂), in the precision of the vectors.

    Later steps take differences between places. Where there are several places, the vectors must be in float64.
    """
    of_pairs = of_pairs.to(vectors.dtype)
    if vectors.shape[-1] == 1 and of_pairs.shape[-1] == 1:
        return vectors * of_pairs
    if vectors.stride(-1) != 1:  # a linear layer's: the result lies in memory as they do
        return (of_pairs.transpose(2, 3) @ vectors.transpose(2, 3)).transpose(2, 3)
    return vectors @ of_pairs


def squares(*gradients: Tensor) -> Tensor:
    """Returns the squared norm of each record's rows taken together, (B,), in float64."""
    flat = [g.flatten(1) for g in gradients]
    few = [f for f in flat if _in_float64(f)]
    many = [part for f in flat if not _in_float64(f) for part in _norms_of_stretches(f)]
    found: list[Tensor] = []
    for parts in filter(None, (few, many)):
        side_by_side = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        found.append(torch.linalg.vector_norm(side_by_side, dim=1, dtype=torch.float64).square())
    return found[0] if len(found) == 1 else found[0] + found[1]


def _in_float64(values: Tensor) -> bool:
    """Returns whether `squares` converts these numbers to float64, which takes up to 40 times as long for many."""
    return values.dtype == torch.float64 or values.numel() < (_FEW_ON_CUDA if values.is_cuda else _FEW_ON_CPU)


def _norms_of_stretches(flat: Tensor) -> list[Tensor]:
    """Returns the norms of each row's stretches of 256 numbers, and of its rest, in their own precision, (B, n)."""
    stretches, rest = divmod(flat.shape[1], _STRETCH)
    found: list[Tensor] = []
    if stretches:
        whole = flat[:, : stretches * _STRETCH].unflatten(1, (stretches, _STRETCH))
        found.append(torch.linalg.vector_norm(whole, dim=2))
    if rest or not stretches:
        found.append(torch.linalg.vector_norm(flat[:, stretches * _STRETCH :], dim=1, keepdim=True))
    return found


def squared_differences(
    weights: Tensor, gradients: Sequence[Tensor], other_weights: Tensor, others: Sequence[Tensor]
) -> Tensor:
    """Returns Σ ‖w g − w'g'‖² of each record, (B,), in float64; on a CPU for as many records at a time as it can cache.

    Args:
        weights: w, (B,).
        gradients: g of each record, of each parameter.
        other_weights: w', (B,).
        others: g', in the same order.
    """
    half = len(gradients)

    def part(w: Tensor, other_w: Tensor, *both: Tensor) -> Tensor:
        one, other = w.reshape(-1, 1), other_w.reshape(-1, 1)
        pairs = zip(both[:half], both[half:], strict=True)
        return squares(*(one * g.flatten(1) - other * h.flatten(1) for g, h in pairs))

    tensors = (weights, other_weights, *gradients, *others)
    if weights.is_cuda:
        return part(*tensors)
    numbers = sum(math.prod(g.shape[1:]) for g in gradients)
    return convolutions.in_parts(part, max(1, numbers), *tensors)


def squares_above(*gradients: Tensor) -> Tensor:
    """Returns squares, (B,), that no rounding puts below the squared norm of each record's rows taken together.

    A gradient whose squares are all too small for its precision counts as nothing: clip norms that small are refused.
    """
    found, (rounding, lost) = squares(*gradients), _squares_errors(*gradients)
    above = found * (1 + rounding)
    return above + (found > 0) * lost if lost else above


def single_place_squares_above(
    of_columns: Tensor, of_rows: Tensor, columns: Tensor, rows: Tensor, rounding: float
) -> Tensor:
    """Returns squares, (B,), that no rounding puts below ‖δ aᵀ‖² of records with one place, where nothing can cancel.

    A factor whose own squares are too small for its precision still counts, because the other one may be huge.

    Args:
        of_columns: ‖a‖² of each record, (B, g, 1, 1), as `gram` finds it.
        of_rows: ‖δ‖² of each record, (B, g, 1, 1).
        columns: a of each record, (B, g, K, 1).
        rows: δ of each record, (B, g, O, 1).
        rounding: the relative error of the product in the precision that the sum is made in.
    """
    factors, above = [], (1 + rounding) ** 2
    for found, values in ((of_columns, columns), (of_rows, rows)):
        rounding_of_squares, lost = _squares_errors(values)
        factors.append(found + values.bool().any(2, keepdim=True) * lost if lost else found)
        above *= 1 + rounding_of_squares
    return gram_squares(*factors) * above


def _squares_errors(*gradients: Tensor) -> tuple[float, float]:
    """Returns the relative error of `squares`, and what it may lose of numbers whose squares are too small.

    The relative error is that of a stretch of 256 numbers, or of all of them in float64. Nothing is lost where float32
    numbers are squared in float64, which has room for them.
    """
    numbers = [math.prod(g.shape[1:]) for g in gradients]
    rounding = (sum(numbers) + 8) * 2.0**-53 + (_STRETCH + 8) * max(torch.finfo(g.dtype).eps for g in gradients) / 2
    lost = sum(
        n * torch.finfo(g.dtype).tiny
        for n, g in zip(numbers, gradients, strict=True)
        if g.dtype == torch.float64 or not _in_float64(g)
    )
    return rounding, lost


def gram_squares(of_columns: Tensor, of_rows: Tensor) -> Tensor:
    """Returns ‖D Aᵀ‖² of each record, (B,), from the Gram matrices of A and of D."""
    terms = of_columns * of_rows
    return terms.flatten() if terms.shape[1:].numel() == 1 else terms.sum((1, 2, 3))


def summed_squares(factors: list[Pair]) -> Tensor:
    """Returns the squared norm of the sum of the gradients that several pairs (columns, rows) make, (B,), unformed."""
    if factors[0][1].shape[-1] <= _FEW_PLACES:
        columns, rows = joined(factors)
        return gram_squares(gram(columns, columns), gram(rows, rows))
    factors = [(precise(columns), precise(rows)) for columns, rows in factors]
    found = []
    for i, (columns, rows) in enumerate(factors):
        found.append(gram_squares(gram(columns, columns), gram(rows, rows)))
        found += [2 * gram_squares(gram(columns, c), gram(rows, r)) for c, r in factors[:i]]
    return torch.stack(found).sum(0)


def joined(factors: list[Pair]) -> Pair:
    """Returns the columns and rows of several pairs as those of one, with more places."""
    if len(factors) == 1:
        return factors[0]
    return torch.cat([columns for columns, _ in factors], -1), torch.cat([rows for _, rows in factors], -1)


@dataclass(frozen=True)
class GramSquares:
    """Squares of gradients that are not formed, from their Gram matrices, and what bounds their rounding.

    Attributes:
        squares: Σ (AᵀA ∘ DᵀD) of each record, (B,).
        spread: S = Σ_l ‖a_l‖ ‖δ_l‖ over all places and groups of each record, (B,).
        own_error: the relative error of the squares, in units of S².
        rounding: the relative error of the sum over places in the precision that it is made in.
    """

    squares: Tensor
    spread: Tensor
    own_error: float
    rounding: float

    @classmethod
    def of(cls, of_columns: Tensor, of_rows: Tensor, width: int, rounding: float) -> GramSquares:
        """Returns the squares of a use.

        Args:
            of_columns: AᵀA of each record, (B, g, L, L), in float64, or of equal indices.
            of_rows: DᵀD of each record, (B, g, L, L), in float64.
            width: K + O, the lengths of a column and of a row.
            rounding: see `sum_rounding`.
        """
        sizes = of_columns.diagonal(dim1=2, dim2=3) * of_rows.diagonal(dim1=2, dim2=3)
        own_error = (width + math.prod(of_rows.shape[1:]) + 8) * 2.0**-53
        return cls(gram_squares(of_columns, of_rows), sizes.sqrt().sum((1, 2)), own_error, rounding)


def gram_squares_above(uses: Iterable[GramSquares], *, floored: bool = False) -> Tensor:
    """Returns squares, (B,), that no rounding puts below Σ ‖fl(D Aᵀ)‖² of these uses, as a sum computes them.

    With S = Σ_l ‖a_l‖ ‖δ_l‖, L places, g groups and u = 2⁻⁵³ (docs/theory/fisher.md):

        ‖D Aᵀ‖² ≤ Σ (AᵀA ∘ DᵀD) + (width + g L² + 8) u S²    width = K + O: dot products of that length in float64
        ‖fl(D Aᵀ)‖ ≤ ‖D Aᵀ‖ + rounding · S                   rounding: see `sum_rounding`

    Args:
        uses: the squares of each use. Those with equal rounding are taken together, with the largest of their errors.
        floored: take no use below S/1024, as where values cannot be read (see `cancelling`).
    """
    alike: dict[float, list[GramSquares]] = {}
    for use in uses:
        alike.setdefault(use.rounding, []).append(use)
    found = []
    for rounding, group in alike.items():
        found_squares = torch.stack([use.squares for use in group]).clamp(min=0)
        whole = torch.stack([use.spread for use in group])
        above = torch.addcmul(found_squares, whole, whole, value=max(use.own_error for use in group)).sqrt()
        above = torch.add(above, whole, alpha=rounding)
        found.append((torch.maximum(above, whole / _CANCELS) if floored else above).square().sum(0))
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


def cancelling(uses: Mapping[int, GramSquares], norms: Tensor) -> set[int]:
    """Returns the uses to be summed in float64: those in which the places of a record nearly cancel, S > 1024 n.

    There the clip leaves the record sums over places of up to C · S/n. A product over the whole batch rounds them by
    the size of what it has added up before, so that one record would move the shares of all others. In float64,
    n ≥ S · 5e-8 by its error term. While a graph is captured no value can be read; such records are clipped further.

    Args:
        uses: by number.
        norms: n of each record, (B,), in float64.
    """
    spreads = torch.stack([use.spread for use in uses.values()])
    far = (spreads > _CANCELS * norms).any(1).tolist()
    return {i for i, is_far in zip(uses, far, strict=True) if is_far}


def sum_rounding(places: int, like: Tensor, *, convolution: bool) -> float:
    """Returns r with ‖fl(D Aᵀ) − D Aᵀ‖ ≤ r Σ_l ‖a_l‖ ‖δ_l‖ for a product summed over n places, in any order.

    Each place is rounded once as it is weighted, once as it is multiplied and once as it is added, and where the
    hardware shortens its factors (TF32, bfloat16) once more for each of the two. (On CUDA a convolution's sum is a
    product of matrices too.)

    Args:
        places: n, the number of places.
        like: a tensor with the product's dtype and device.
        convolution: whether a convolution makes the product.
    """
    rounding = (places + 4) * torch.finfo(like.dtype).eps
    if like.dtype != torch.float32:
        return rounding
    place = "cuda.matmul" if like.is_cuda else "mkldnn.conv" if convolution else "mkldnn.matmul"
    try:
        precision = attrgetter(f"{place}.fp32_precision")(torch.backends)
    except AttributeError:  # before torch 2.9
        precision = torch.get_float32_matmul_precision()
    return rounding + 2.0 * _SHORTENING.get(precision, max(_SHORTENING.values()))  # a later torch's name: as bad as any


def rounded_above(norms: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns float64 norms in this dtype, with room for the rounding of a clip's factor and of the sum it enters."""
    return (norms * (1 + sum_rounding(4, norms.new_empty((), dtype=dtype), convolution=False))).to(dtype)


def weighted_sums(weights: Tensor, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns Σ_i weights_i g_i of gradients (B, ...), by name, flat; on CUDA the small ones in one product.

    Args:
        weights: (B,).
        gradients: those of each record, by name.
    """
    flat = {name: g.flatten(1) for name, g in gradients.items()}
    small = {name: f for name, f in flat.items() if f.shape[1] <= _SMALL and f.is_cuda}
    if len(small) < 2:
        return {name: weights @ f for name, f in flat.items()}
    joined = weights @ torch.cat([*small.values()], 1)
    found = dict(zip(small, joined.split([f.shape[1] for f in small.values()]), strict=True))
    return {name: found[name] if name in found else weights @ f for name, f in flat.items()}


def forms_gradient(k: int, o: int, places: int, *, cuda: bool) -> bool:
    """Returns whether it is cheaper to form G (O·K numbers) than the Gram matrices of L × L places, in float64."""
    return k * o < 2 * (k + o) * places or (cuda and k * o <= _SMALL and places > _FEW_PLACES)


def record_gradients(columns: Tensor, rows: Tensor) -> Tensor:
    """Returns G = D Aᵀ for every record: (B, g, O, K)."""
    if columns.shape[2] == 1 and rows.shape[2] == 1:
        return (rows * columns).sum(3, keepdim=True)
    return rows @ columns.transpose(2, 3)


def gradients_in_parts(rule: Rule, pairs: list[Pair], *, grouped: bool = False, squared: bool = False) -> Tensor | None:
    """Returns the sum of the gradients that pairs (a, δ) make in a convolution on a CPU, for a few records at a time.

    Each record's gradient is a product of its own, as in `record_gradients`.

    Args:
        rule: the layer's.
        pairs: (a, δ) of all records.
        grouped: only where no patches are made (`convolutions.groups_apply`).
        squared: only its squared norm, so that few gradients are held at once.

    Returns:
        (B, g, O, K), or squared (B,) in float64. None: it is no convolution on a CPU, or its numbers have several
        precisions, or it is cheaper not to form the gradients.
    """
    if not isinstance(rule, ConvRule):
        return None
    (a, delta), dtypes = pairs[0], {values.dtype for pair in pairs for values in pair}
    if a.device.type != "cpu" or len(dtypes) > 1 or not len(a):
        return None
    k, o = a.shape[1] // rule.groups * math.prod(rule.kernel), delta.shape[1] // rule.groups
    by_groups = convolutions.groups_apply(rule, a.shape[1], delta)
    if (grouped and not by_groups) or not forms_gradient(k, o, math.prod(delta.shape[2:]) * len(pairs), cuda=False):
        return None

    def part(*flat: Tensor) -> Tensor:
        some = [*zip(flat[::2], flat[1::2], strict=True)]
        if by_groups:
            found = convolutions.grouped_gradients(rule, some)
        else:
            found = summed_gradients([(rule.columns(a), rule.rows(delta)) for a, delta in some])
        return squares(found) if squared else found

    each = delta.shape[1] if by_groups else math.prod(delta.shape[2:])  # of gradients, or of patches
    numbers = len(pairs) * a.shape[1] * math.prod(rule.kernel) * each
    return convolutions.in_parts(part, numbers, *(values for pair in pairs for values in pair))


def summed_gradients(factors: list[Pair]) -> Tensor:
    """Returns the sum of the gradients that several pairs (columns, rows) make."""
    total = record_gradients(*factors[0])
    for columns, rows in factors[1:]:
        if columns.shape[2] == 1 and rows.shape[2] == 1:
            total += record_gradients(columns, rows)
        else:
            total.flatten(0, 1).baddbmm_(rows.flatten(0, 1), columns.transpose(2, 3).flatten(0, 1))
    return total


def full_gradients(rule: Rule, a: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
    """Returns the weight gradient of every record in the weight's own layout, (B, *weight.shape)."""
    if isinstance(rule, EmbeddingRule):
        index = a.reshape(a.shape[0], -1, 1).expand(-1, -1, weight.shape[1])
        zeros = delta.new_zeros(a.shape[0], *weight.shape)
        return zeros.scatter_add_(1, index, delta.reshape(index.shape))
    return record_gradients(rule.columns(a), rule.rows(delta)).reshape(-1, *weight.shape)


def apply_each(rule: Rule, a: Tensor, weights: Tensor, like: Tensor, factors: list[Pair]) -> Tensor:
    """Applies the layer to a with another weight for every record, (B, *weight.shape).

    Args:
        rule: the layer's.
        a: its input.
        weights: those of each record.
        like: has the output's shape.
        factors: columns of the input and rows, if they were made.
    """
    if not factors and isinstance(rule, ConvRule) and convolutions.groups_apply(rule, a.shape[1], like):
        return convolutions.in_parts(
            partial(convolutions.grouped_apply, rule), math.prod(weights.shape[1:]), a, weights
        )
    columns = factors[0][0] if factors else rule.columns(a)
    if isinstance(rule, EmbeddingRule):
        index = columns.transpose(1, 2).expand(-1, -1, weights.shape[2])
        return weights.gather(1, index).reshape(like.shape)
    matrices = weights.reshape(weights.shape[0], columns.shape[1], -1, columns.shape[2])
    return rule.from_rows(_times(matrices, columns), like.shape)


def transpose_each(rule: Rule, delta: Tensor, weights: Tensor, like: Tensor) -> Tensor:
    """Applies the transpose of `apply_each` in its input; like has the input's shape."""
    rows = rule.rows(delta)
    matrices = weights.reshape(weights.shape[0], rows.shape[1], rows.shape[2], -1)
    if isinstance(rule, ConvRule):
        return rule.transpose_records(matrices, delta, like.shape)
    return rule.from_columns(_times(matrices.transpose(2, 3), rows), like.shape)


def _times(matrices: Tensor, columns: Tensor) -> Tensor:
    """Returns the products of matrices (B, g, O, K) with columns (B, g, K, L); of single numbers without matrices."""
    return matrices * columns if matrices.shape[2:].numel() == 1 else matrices @ columns


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """Returns the widest precision among floating-point tensors, and at least float32."""
    widest = torch.float32
    for tensor in tensors:
        if tensor.is_floating_point():
            widest = torch.promote_types(widest, tensor.dtype)
    return widest


def zero_sums(params: Params) -> dict[str, Tensor]:
    """Returns a sum of no gradients, by parameter name, in float32 or wider."""
    return {name: torch.zeros_like(p, dtype=wide_dtype(p)) for name, p in params.items()}
