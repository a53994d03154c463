"""The work of a fleet at one step: gradient sums and information of K trainings, replayed as one CUDA graph.

Two engines give the same numbers. Stacked puts all trainings into the same operations, so that their number does not
grow with K. Branches takes any model, with a branch of the graph for each training, on several streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from reconbound._internal.checks import InputError
from reconbound.fisher import Private, ProbeOptions, StepOptions, clipping, step_information
from reconbound.fisher.probes import Basis
from reconbound.fisher.sums import methods_that_pass, open_pass
from reconbound.sweep.fleet.stacked import Stack
from reconbound.training.static import Rows, capture
from reconbound.validate.private import Problem

if TYPE_CHECKING:
    from reconbound.sweep.fleet.trainer import Fleet

LossFn = Callable[[Any, Any], Tensor]
METHODS = ("auto", "stacked", "branches")


class Work(Rows):
    """A function of padded records and probes, run for all trainings: directly on a CPU, as a CUDA graph on a GPU.

    Its inputs are the buffers here. Nothing it does depends on how often it was run before.
    """

    def __init__(self, fleet: Fleet, size: int, function: Callable[[Work], None]) -> None:
        first, dtype = fleet.settings[0], fleet.params.dtype
        super().__init__((fleet.inputs, fleet.targets), size, fleet.device)
        self.fleet, self.function, self.mask = fleet, function, self.mask.to(dtype)
        shape = fleet.inputs.shape[1:]
        self.omegas = [torch.zeros(shape, dtype=dtype, device=fleet.device) for _ in range(first.probes)]
        self.found = torch.zeros(3, len(fleet.settings), size, dtype=dtype, device=fleet.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, records: Tensor) -> None:
        if len(records):
            self.fill(records)
        else:  # whatever the buffers hold counts for nothing
            self.mask.zero_()
        if self.device.type == "cpu":
            self.function(self)
            return
        if self.graph is None:
            self.graph, _ = capture(lambda: self.function(self), self.device)
        self.graph.replay()


class Stacked:
    """The engine that puts all trainings into the same operations."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.stack = fleet, Stack(fleet.models[0], fleet.params)

    def gradient_sums(self, work: Work) -> None:
        fleet = self.fleet
        opened = self.stack.open(work.inputs, work.targets, fleet.loss_fn, measured=False)
        norms = opened.norms()
        factor = clipping(norms / fleet.clip_norm, 1.0, fleet.settings[0].clip).factor
        work.found[0] = factor * norms
        opened.weighted_sum(factor * work.mask, fleet.sums)

    def information(self, work: Work) -> None:
        """Computes what fisher/step.py computes, with probes in the private part and two directions of signs."""
        fleet = self.fleet
        opened = self.stack.open(work.inputs, work.targets, fleet.loss_fn, measured=True)
        norms = opened.norms()
        clips = clipping(norms / fleet.clip_norm, 1.0, fleet.settings[0].clip)
        inverse = torch.where(norms > 0, 1 / norms, 0).flatten()
        h, slope = opened.own() * inverse[:, None], opened.slope
        assert slope is not None
        if fleet.mask is not None:
            h, slope = h * fleet.mask.flatten(), slope * fleet.mask.flatten()
        basis = Basis(h, slope)
        values = []
        for omega in work.omegas:
            omega = omega if fleet.mask is None else omega * fleet.mask
            v = basis.with_signs(omega.flatten(), len(h))
            inner = (h * v).sum(1).reshape(norms.shape)
            values.append((opened.moved(v) - inner.square()).clamp(min=0))
        across = values[0] if len(values) == 1 else torch.stack(values).mean(0)
        scale = (work.mask / fleet.scale).double()  # in float32 the square of 1e-23 is 0
        work.found[0] = clips.factor * norms
        work.found[1] = (clips.factor * scale).square() * across
        work.found[2] = (clips.radial * scale).square() * h.double().square().sum(1).reshape(norms.shape)


class Branches:
    """The engine with a branch of the graph for each training; branches on different streams may run side by side."""

    def __init__(self, fleet: Fleet, streams: int) -> None:
        self.fleet = fleet
        few, kinds = (fleet.inputs[:4], fleet.targets[:4]), (Private("nothing"), fleet.private)
        clipped = {name: getattr(fleet.settings[0], name) for name in ("max_grad_norm", "clip")}
        self.methods = methods_that_pass(fleet.models[0], fleet.loss_fn, few, kinds, **clipped)
        self.streams = [torch.cuda.Stream(fleet.device) for _ in range(streams if fleet.device.type == "cuda" else 0)]

    def _each(self) -> Iterator[int]:
        """Yields the number of each training, within its stream."""
        here: Any = torch.cuda.current_stream() if self.streams else None
        for stream in self.streams:
            stream.wait_stream(here)
        for k in range(len(self.fleet.settings)):
            with torch.cuda.stream(self.streams[k % len(self.streams)] if self.streams else None):
                yield k
        for stream in self.streams:
            here.wait_stream(stream)

    def gradient_sums(self, work: Work) -> None:
        """Computes Σ c g of every training over the work's records, into the fleet's sums, and clipped norms."""
        for k in self._each():
            s, problem = self.fleet.settings[k], Problem(self.fleet.models[k], self.fleet.loss_fn, Private("nothing"))
            batch = (work.mask, work.inputs, work.targets)
            opened = open_pass(problem, batch, self.methods[0], check=False, measured=False)
            norms = opened.norms()
            factor = clipping(norms, s.max_grad_norm, s.clip).factor
            work.found[0, k] = factor * norms
            sums = opened.weighted_sum(factor * work.mask)
            torch.cat([v.flatten() for v in sums.values()], out=self.fleet.sums[k])

    def information(self, work: Work) -> None:
        """Computes clipped norm, across and along of every training for the work's records, into found."""
        probes = ProbeOptions(space="inputs", directions=work.omegas, error="bound")
        options = StepOptions(
            private=self.fleet.private, mask=work.mask, method=self.methods[1], checked=True, probes=probes
        )
        for k in self._each():
            s = self.fleet.settings[k]
            info = step_information(
                self.fleet.models[k],
                self.fleet.loss_fn,
                work.inputs,
                work.targets,
                max_grad_norm=s.max_grad_norm,
                noise_multiplier=s.noise_multiplier,
                clip=s.clip,
                options=options,
            )
            torch.stack([info.clipped_norm, info.across, info.along], out=work.found[:, k])


def make_engine(fleet: Fleet, method: str, streams: int) -> Stacked | Branches:
    """Creates the engine of that name; "auto": stacked where the model's layers and a first record allow it.

    Args:
        fleet: the trainings.
        method: "stacked", "branches" or "auto".
        streams: branches that may run side by side.
    """
    if method == "branches":
        return Branches(fleet, streams)
    try:
        engine = Stacked(fleet)
        _check_alike(fleet, engine.stack)
    except (ValueError, RuntimeError) as reason:  # torch's own error: a layer does not take a batch of this layout
        if method == "stacked":
            raise InputError("method", f"must be branches for this model ({reason})", method) from None
        return Branches(fleet, streams)
    return engine


def _check_alike(fleet: Fleet, stack: Stack) -> None:
    """Raises a ValueError where the model does more than its layers in a row: a forward of its own, a hook.

    It is tried at random parameters and a random record: at those of the start, possibly zeros, other functions give
    the same outputs.
    """
    model, start = fleet.models[0], fleet.params.clone()
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    if hooked or type(model).forward is not nn.Sequential.forward:
        raise ValueError("it does more than its layers in a row: a hook, or a forward of its own")
    generator = torch.Generator(fleet.device).manual_seed(0)
    try:
        fleet.params.normal_(0, 0.3, generator=generator)
        record = torch.empty_like(fleet.inputs[:1]).normal_(generator=generator)
        opened = stack.open(record, fleet.targets[:1], fleet.loss_fn, measured=False)
        sums = torch.empty_like(fleet.params)
        opened.weighted_sum(torch.ones_like(opened.norms()), sums)
        with torch.enable_grad():
            own = model(record)
            gradients = torch.autograd.grad(fleet.loss_fn(own, fleet.targets[:1]).sum(), list(model.parameters()))
    finally:
        fleet.params.copy_(start)
    found, plain = opened.outputs[:1].detach(), torch.cat([g.flatten() for g in gradients])
    if own.shape != found.shape or not bool((own - found).abs().max() <= 0.01 * own.abs().max()):  # TF32's rounding
        raise ValueError("its outputs are not those of its layers in a row")
    if not bool((sums[0] - plain).norm() <= 0.01 * plain.norm()):
        raise ValueError("its gradients are not those of its layers in a row")
