"""Gradient sums and measurements of a step at fixed shapes, with the numbers that the eager ones give.

What a CUDA graph must not contain is done outside: probes are drawn, and other worlds are asked for, into buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from reconbound._internal import chacha
from reconbound._internal.checks import warn_user
from reconbound.fisher import ProbeOptions, StepInformation, clipped_gradient_sum, step_information
from reconbound.fisher.probes import draw_input_probes, draw_probes
from reconbound.fisher.sums import ClippedSum
from reconbound.fisher.worlds import StepDistances, changed_batch, step_distances
from reconbound.training.noise import Release, keys_for
from reconbound.training.settings import all_finite
from reconbound.training.static import WHOLE, Found, Near, Rows, StaticWork
from reconbound.validate.private import Problem, as_private, private_part

if TYPE_CHECKING:
    from reconbound.training.step import Measurer


class Summed(NamedTuple):
    """A clipped sum and what was computed with it.

    Attributes:
        total: the sum, flat.
        finite: whether all of it is finite; None: not known.
        released: the noisy mean gradient, flat; None: not computed.
    """

    total: Tensor
    finite: Tensor | None = None
    released: Tensor | None = None


class Moment(NamedTuple):
    """A step of a release: what its noise is a function of, beside the sum.

    Attributes:
        run_seed: of the release.
        step: its number.
    """

    run_seed: int
    step: int


class StaticStep:
    """Computes what a Measurer does, at fixed shapes. Every method returns None where it is to be computed eagerly.

    Args:
        measurer: of the training.
        sizes: to which records are padded, ascending.
        release: makes the noisy mean gradient of a sum; None: it is made elsewhere.
    """

    def __init__(self, measurer: Measurer, sizes: Sequence[int], release: Release | None = None) -> None:
        self.measurer = m = measurer
        self.release, self._releases = release, 0
        self._like: Tensor | None = None  # of a sum's kind and length
        self._templates: dict[str, Any] = {}  # what is not a tensor in results
        self._probes: list[Any] = []
        self._near = Near((m.inputs, m.targets), m.device)
        about = (m.model, self._near.data, sizes)
        self._sums = StaticWork(*about, self._gradient_sum)
        self._informed = self._apart = None
        if m.settings.rules is not None and not m.kept.spectral:  # spectral norms draw inside
            self._informed = StaticWork(*about, self._information)
        if m.worlds:
            self._apart = StaticWork(*about, self._distances, prepare=self._change)

    def gradient_sum(self, records: Tensor, moment: Moment | None = None) -> tuple[ClippedSum, Summed] | None:
        """Returns what the clipped sum of these records says of each, and the sum.

        Args:
            records: their indices, in main memory.
            moment: of the step whose batch they are; None: nothing is released.
        """
        self._near.refresh()
        secret = self._secret(moment)
        found = self._sums(records, secret)
        if found is None:
            return None
        parts = (found["loss"], found["norm"], found["factor"])
        return ClippedSum(*parts, gradient_sum={}), self._summed(found, secret)

    def information(
        self, records: Tensor, generator: torch.Generator, moment: Moment | None = None
    ) -> tuple[StepInformation, Summed] | None:
        """Returns the information about these records, and their clipped sum.

        Args:
            records: their indices, in main memory.
            generator: draws the probes; left as it was where None is returned.
            moment: as in `gradient_sum`.
        """
        if self._informed is None or self._informed.eager:
            return None
        self._near.refresh()
        before = generator.get_state()
        self._draw(generator)
        secret = self._secret(moment)
        found = self._informed(records, secret)
        if found is None:
            generator.set_state(before)
            return None
        summed = self._summed(found, secret)
        for name in WHOLE:
            found.pop(name, None)
        return replace(self._templates["information"], mask=None, **found), summed

    def distances(self, records: Tensor) -> tuple[StepDistances, Tensor] | None:
        """Returns the distances of these records to the replaced worlds, and whether their numbers are finite.

        Args:
            records: their indices, in main memory.
        """
        self._near.refresh()
        found = None if self._apart is None else self._apart(records)
        if found is None:
            return None
        parts: dict[str, dict[str, Tensor]] = {"other": {}, "squared": {}}
        for name, value in found.items():
            kind, separator, world = name.partition("/")
            if separator:
                parts[kind][world] = value
        template: StepDistances = self._templates["distances"]
        own = replace(template, loss=found["loss"], clipped_norm=found["norm"], mask=None)
        return replace(own, other_norm=parts["other"], squared_distance=parts["squared"]), found["finite"]

    def _secret(self, moment: Moment | None) -> bytes:
        """Returns the keys of a step's noise; none where they are not known before the sum is."""
        known = self.release is not None and moment is not None and self._like is not None
        return keys_for(self._like, *moment) if known else b""  # type: ignore[arg-type, misc]

    def _summed(self, found: Found, secret: bytes) -> Summed:
        """Returns the sum with what is released of it under these keys.

        Releases 1, 2, 4, 8, ... are compared with those without a graph, bit for bit; where they differ, it is left.
        """
        total, finite = found["total"], found["finite"]
        if self._like is None or (self._like.dtype, len(self._like)) != (total.dtype, len(total)):
            self._like, secret = torch.empty_like(total, device="meta"), b""
        released = found.get("released") if secret else None
        if released is None or self.release is None:
            return Summed(total, finite)
        self._releases += 1
        if self._releases & (self._releases - 1) == 0:
            words = chacha.key_words(secret, total.device)
            if not torch.equal(released, self.release(total, words)):
                self.release = None
                warn_user("a CUDA graph does not give the cipher's noise here: it is drawn without one, more slowly")
                return Summed(total, finite)
        return Summed(total, finite, released)

    # --- the functions of padded rows ------------------------------------------------------------

    def _released(self, total: Tensor, rows: Rows) -> Found:
        return {} if self.release is None else {"released": self.release(total, rows.words)}

    def _gradient_sum(self, rows: Rows) -> Found:
        m = self.measurer
        how = m.sum_options(mask=rows.mask, method=self._method(0))
        clipped = clipped_gradient_sum(m.model, m.loss_fn, rows.inputs, rows.targets, **how)
        total = m.joined(clipped.gradient_sum)
        own = {"loss": clipped.loss, "norm": clipped.norm, "factor": clipped.factor, "total": total}
        return {**own, "finite": all_finite(clipped.loss, clipped.norm, total), **self._released(total, rows)}

    def _information(self, rows: Rows) -> Found:
        m, inputs = self.measurer, isinstance(self._probes[0], Tensor)
        space: Any = "inputs" if inputs else "weights"
        probes = ProbeOptions(directions=self._probes, space=space, error="bound")
        how = m.step_options(probes, mask=rows.mask, method=self._method(1))
        found = step_information(m.model, m.loss_fn, rows.inputs, rows.targets, **how)
        self._templates["information"] = replace(found, gradient_sum={})
        values = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "mask"}
        own = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        total = m.joined(found.gradient_sum)
        own |= {"total": total, "finite": all_finite(found.loss, found.norm, found.trace, total)}
        return own if isinstance(m.settings.budget, float) else own | self._released(total, rows)  # else of no batch

    def _distances(self, rows: Rows) -> Found:
        m = self.measurer
        worlds = {name: partial(_given, rows.more[name]) for name in m.worlds}
        how = m.sum_options(mask=rows.mask, method=self._method(0))
        found = step_distances(m.model, m.loss_fn, rows.inputs, rows.targets, worlds, **how)
        self._templates["distances"] = found
        own = {"loss": found.loss, "norm": found.clipped_norm}
        own |= {f"other/{name}": value for name, value in found.other_norm.items()}
        own |= {f"squared/{name}": value for name, value in found.squared_distance.items()}
        return {**own, "finite": all_finite(*own.values())}

    def _method(self, k: int) -> Any:
        """Returns "layers" for "auto": a batch that they do not cover must not be captured in another way."""
        return "layers" if self.measurer.methods[k] == "auto" else self.measurer.methods[k]

    # --- what graphs must not contain ------------------------------------------------------------

    def _draw(self, generator: torch.Generator) -> None:
        """Draws the probes that `step_information` would, into their buffers."""
        m = self.measurer
        if m.kept.diagonal:
            drawn: list[Any] = draw_probes(m.params, m.settings.probes, generator)
        else:
            if "private part" not in self._templates:
                problem = Problem(m.model, m.loss_fn, as_private(m.private))
                self._templates["private part"] = private_part(problem, *m.rows(torch.zeros(1, dtype=torch.int64)))
            drawn = list(draw_input_probes(self._templates["private part"], m.settings.probes, generator))
        _copied(self._probes, drawn)

    def _change(self, rows: Rows) -> None:
        """Asks every world for its batch."""
        for name, world in self.measurer.worlds.items():
            inputs, targets = changed_batch(name, world, rows.inputs, rows.targets)
            _copied(rows.more.setdefault(name, []), [inputs, targets])


def _given(batch: list[Any], inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Returns a world's batch, whatever that of the real world is."""
    return batch[0], batch[1]


def _copied(buffers: list[Any], values: list[Any]) -> None:
    """Copies trees of tensors into their buffers, which are made of the first."""
    if not buffers:
        buffers.extend(tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, values))
        return
    tree_map(lambda to, new: to.copy_(new) if isinstance(to, Tensor) else to, buffers, values)
