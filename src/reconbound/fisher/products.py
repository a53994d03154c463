"""Products with the weight gradients of single records, G = D Aᵀ, formed or not: whichever is less (layers.py)."""

from __future__ import annotations

from torch import Tensor

from reconbound.fisher.layers import ConvRule, EmbeddingRule, Rule

_FEW_PLACES = 4
_SMALL = 8192  # on CUDA a gradient of so few numbers is formed: cuDNN sums those that are not, slowly


def gram(first: Tensor, second: Tensor) -> Tensor:
    """Inner products of columns, (B, g, L₁, L₂); of indices: 1 where they are equal."""
    if not first.is_floating_point():
        return first.unsqueeze(3) == second.unsqueeze(2)
    if first.is_cuda and first.shape[3] * second.shape[3] <= _FEW_PLACES:  # a product of matrices that is slow there
        return (first.unsqueeze(4) * second.unsqueeze(3)).sum(2)
    return first.transpose(2, 3) @ second


def forms_gradient(columns: Tensor, rows: Tensor, places: int) -> bool:
    """Whether it is cheaper to form G (O·K numbers) than the Gram matrices of L × L places."""
    if not columns.is_floating_point():
        return False
    k, o = columns.shape[2], rows.shape[2]
    if columns.is_cuda and k * o <= _SMALL and places > _FEW_PLACES:
        return True
    return 3 * k * o < 2 * (k + o) * places


def record_gradients(columns: Tensor, rows: Tensor) -> Tensor:
    """G = D Aᵀ for every record: (B, g, O, K)."""
    if columns.shape[2] == 1 and rows.shape[2] == 1:
        return (rows * columns).sum(3, keepdim=True)
    return rows @ columns.transpose(2, 3)


def summed_gradients(factors: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of the gradients that several pairs (columns, rows) make."""
    total = record_gradients(*factors[0])
    for columns, rows in factors[1:]:
        if columns.shape[2] == 1 and rows.shape[2] == 1:
            total += record_gradients(columns, rows)
        else:
            total.flatten(0, 1).baddbmm_(rows.flatten(0, 1), columns.transpose(2, 3).flatten(0, 1))
    return total


def full_gradients(rule: Rule, a: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
    """The weight gradient of every record in the weight's own layout, (B, *weight.shape)."""
    if isinstance(rule, EmbeddingRule):
        index = a.reshape(a.shape[0], -1, 1).expand(-1, -1, weight.shape[1])
        zeros = delta.new_zeros(a.shape[0], *weight.shape)
        return zeros.scatter_add_(1, index, delta.reshape(index.shape))
    return record_gradients(rule.columns(a), rule.rows(delta)).reshape(-1, *weight.shape)


def apply_each(rule: Rule, a: Tensor, weights: Tensor, like: Tensor) -> Tensor:
    """The layer with a weight of its own for every record, (B, *weight.shape); like has the output's shape."""
    if isinstance(rule, EmbeddingRule):
        index = a.reshape(a.shape[0], -1, 1).expand(-1, -1, weights.shape[2])
        return weights.gather(1, index).reshape(like.shape)
    columns = rule.columns(a)
    matrices = weights.reshape(weights.shape[0], columns.shape[1], -1, columns.shape[2])
    return rule.from_rows(matrices @ columns, like.shape)


def transpose_each(rule: Rule, delta: Tensor, weights: Tensor, like: Tensor) -> Tensor:
    """The transpose of apply_each in its input; like has the input's shape."""
    rows = rule.rows(delta)
    matrices = weights.reshape(weights.shape[0], rows.shape[1], rows.shape[2], -1)
    if isinstance(rule, ConvRule):
        return rule.transpose_records(matrices, delta, like.shape)
    return rule.from_columns(matrices.transpose(2, 3) @ rows, like.shape)
