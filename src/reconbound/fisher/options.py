"""Options of a step's measurement and of its gradient sum, in small frozen groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from reconbound._internal.checks import InputError, choice, flag, number, whole
from reconbound.fisher.clipping import check_clip
from reconbound.validate import model as models
from reconbound.validate.private import Private, Problem, trainable

Method = Literal["auto", "layers", "mixed", "generic"]
ErrorFrom = Literal["auto", "spread", "product", "bound"]
ProbeSpace = Literal["auto", "weights", "inputs"]


@dataclass(frozen=True, eq=False)
class SumOptions:
    """Options of a clipped gradient sum.

    Attributes:
        micro_batch: records at a time; the results do not depend on it, memory does.
        mask: (B,) of 0 and 1 (or bool): records with 0 are padding, add nothing to the sum, have zero information and
            are no measurements of a ledger.
        method: "layers" (a rule per layer), "mixed" (the same, and a copy for each record of every parameter that no
            rule covers), "generic" (torch.func), "auto": the first of these that covers the model.
        checked: skip the checks that read values (finite data, no BatchNorm or dropout), the search for jumps (made
            once for a model and a loss) and the check on a batch of another size, which the caller has made
            (`check_batch`, `covering_method`). In a CUDA graph that is being captured they are skipped anyway.
    """

    micro_batch: int | None = None
    mask: Tensor | None = None
    method: Method = "auto"
    checked: bool = False

    def __post_init__(self) -> None:
        if self.micro_batch is not None:
            object.__setattr__(self, "micro_batch", whole("micro_batch", self.micro_batch))
        if self.mask is not None and not isinstance(self.mask, Tensor):
            raise InputError("mask", "must be a tensor of 0 and 1, (B,)", type(self.mask).__name__)
        choice("method", self.method, ("auto", "layers", "mixed", "generic"))
        flag("checked", self.checked)


@dataclass(frozen=True, eq=False)
class ProbeOptions:
    """Options of the random probes that estimate the information across the gradient.

    Attributes:
        count: the number of probes.
        space: where they lie. "weights": Gaussian in parameter space; they also give the diagonal, and an error from
            one probe ("product"). "inputs": in the private part, with random signs along some directions: a smaller
            variance at the same cost. "auto": inputs, unless the diagonal or the error "product" needs weights.
        deflate: the number of those directions, 0 to 3: h, ∇_z ℓ (next to free), the slope of the outputs' size (one
            backward pass more; worth it with many probes). One that does not exist is left out. Unbiased with any.
        directions: these probes instead of random ones, each a dictionary from parameter name to tensor (weights), or a
            tensor of one record's private part (space="inputs").
        error: where the standard error of `across` comes from. "spread": that of the probes' values (two or more).
            "product": √2 ‖P J r‖, whose square is unbiased for the variance 2 ‖PJJᵀP‖²_F; one more product with J,
            meant for one probe. "bound": √2 · across, the most it can be, at no cost. "auto": spread, or product for
            one probe (bound if it is one of the inputs).
        generator: draws the probes, once for the whole batch. None: fresh ones from the operating system, whatever
            torch's global generator was seeded with; to repeat a measurement, pass a generator.
    """

    count: int = 1
    space: ProbeSpace = "auto"
    deflate: int = 2
    directions: Sequence[Mapping[str, Tensor]] | Sequence[Tensor] | None = None
    error: ErrorFrom = "auto"
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", whole("count", self.count))
        choice("space", self.space, ("auto", "weights", "inputs"))
        if whole("deflate", self.deflate, at_least=0) > 3:
            raise InputError("deflate", "must be at most 3", self.deflate)
        choice("error", self.error, ("auto", "spread", "product", "bound"))
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise InputError("generator", "must be a torch.Generator", self.generator)
        given = self.directions
        if given is not None and not (isinstance(given, list | tuple) and given and all(map(_is_direction, given))):
            raise InputError("directions", "must be a list of tensors or of dictionaries of tensors", given)
        if self.error == "spread" and self.number < 2:
            raise InputError("error", 'must be "product" or "bound" for one probe', self.error)

    @property
    def number(self) -> int:
        """Returns the number of probes, drawn or given."""
        return self.count if self.directions is None else len(self.directions)

    @property
    def resolved_error(self) -> ErrorFrom:
        """Returns the source of the standard error that "auto" means."""
        if self.error != "auto":
            return self.error
        return "spread" if self.number > 1 else "bound" if self.space == "inputs" else "product"


@dataclass(frozen=True, eq=False)
class StepOptions(SumOptions):
    """Options of the measurement of one step. The first four attributes are those of `SumOptions`.

    Attributes:
        micro_batch: records at a time; the results do not depend on it, memory does.
        mask: (B,) of 0 and 1 (or bool): records with 0 are padding.
        method: "layers", "mixed", "generic" or "auto".
        checked: skip the checks that the caller has made.
        private: None (the whole input), a mask or indices of features, "target", or a `Private`.
        diagonal: also compute the diagonal over features.
        spectral: also compute the spectral norm, from below and above, by this number k of power iterations (True: 30).
            The bound from above is at most about (8e5 √d)^(1/(k + 1)) times too high: 1.73 for 30 and d = 784, 1.09 for
            200.
        probes: the options of the random probes.

    >>> StepOptions(private="target", probes=ProbeOptions(count=4)).probes.count
    4
    """

    private: Private | Tensor | Sequence[int] | str | None = None
    diagonal: bool = False
    spectral: bool | int = False
    probes: ProbeOptions = field(default_factory=ProbeOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        flag("diagonal", self.diagonal)
        iterations = 30 * self.spectral if isinstance(self.spectral, bool) else self.spectral
        object.__setattr__(self, "spectral", whole("spectral", iterations, at_least=0))
        if not isinstance(self.probes, ProbeOptions):
            raise InputError("probes", "must be a ProbeOptions", self.probes)
        needed = "diagonal=True" if self.diagonal else 'error="product"' if self.probes.error == "product" else None
        if needed and self.probes.space == "inputs":
            raise InputError("space", f'must be "weights" for {needed}', self.probes.space)

    @property
    def probes_inputs(self) -> bool:
        """Returns whether the probes lie in the private part."""
        needs_weights = self.diagonal or self.probes.resolved_error == "product"
        chosen = self.probes.space == "auto" and not needs_weights and self.probes.directions is None
        return self.probes.space == "inputs" or chosen


def _is_direction(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, Mapping) and all(isinstance(v, Tensor) for v in value.values())
    )


_SMALLEST_CLIP = 1e-12  # the squares of gradients as small as that are lost in float32


def check_arguments(
    model: Any, loss_fn: Any, data: tuple[Any, Any], max_grad_norm: Any, clip: Any, options: Any, kind: type[SumOptions]
) -> None:
    """Checks kinds and devices: a module, a function, a clip, tensors on the module's device, a generator there too."""
    if not isinstance(options, kind):
        raise InputError("options", f"must be a {kind.__name__}", options)
    if number("max_grad_norm", max_grad_norm, above=0) < _SMALLEST_CLIP:
        raise InputError("max_grad_norm", f"must be at least {_SMALLEST_CLIP:g} (scale the loss)", max_grad_norm)
    check_clip(clip)
    generator = options.probes.generator if isinstance(options, StepOptions) else None
    models.check_module(model)
    if not callable(loss_fn):
        raise InputError("loss_fn", "must be a function (outputs, targets) -> losses, (B,)", type(loss_fn).__name__)
    if torch.is_inference_mode_enabled():
        raise models.ModelError("this call takes gradients, which torch.inference_mode() forbids: call it outside")
    kinds = {p.device.type for p in model.parameters()}
    for device in filter(torch.is_autocast_enabled, kinds):  # the sums of gradients would be rounded to 8 or 11 bits
        raise ValueError(
            f"autocast is on for {device} around this call, in which gradients are clipped and summed: "
            "put `with torch.autocast(...)` into the model's forward instead"
        )
    models.check_tensors(model, *data)
    if generator is not None and kinds and generator.device.type not in kinds:
        what = f"generator is on {generator.device}, the model on {min(kinds)}"
        raise models.ModelError(f"{what}: use torch.Generator('{min(kinds)}')")


def check_values(model: nn.Module, inputs: Any, targets: Any) -> None:
    """Checks for BatchNorm, dropout in use and parameters that are not finite (ModelError), and for finite data."""
    models.check_structure(model)
    models.check_finite(inputs, targets)


def capturing(tensor: Tensor) -> bool:
    """Returns whether a CUDA graph is being captured. Nothing may wait for a value then."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def check_overflow(values: Tensor, name: str, what: str, start: int = 0) -> None:
    """Refuses values of records that are not finite: one makes a whole sum not finite, which shows who took part.

    Args:
        values: of the records of a micro-batch.
        name: of the values.
        what: overflows.
        start: the micro-batch's first record.
    """
    bad = torch.nonzero(~torch.isfinite(values)).flatten()
    if len(bad):
        first = int(bad[0])
        raise ValueError(
            f"record {start + first} of the batch has {name} {values[first].item()}: {what} overflows {values.dtype} "
            "or the dtype of the model; scale the data or the loss, or use float64"
        )


def released(problem: Problem) -> dict[str, Tensor]:
    """Returns the parameters whose gradients are released, or raises an error that says what is wrong with them."""
    params = trainable(problem)
    for name, module in problem.model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"the module {name or type(module).__name__!r} is compiled: pass the model as it was before"
            )
    if not params:
        raise ValueError("the model has no trainable parameters: nothing is released")
    for name, p in params.items():
        if not p.is_floating_point():
            raise ValueError(f"the trainable parameter {name} is {p.dtype}: it must be real, as two real parameters")
    return params


CUT = (
    "look for detach(), .data, argmax, integer casts, NumPy or torch.no_grad() in the model and in loss_fn; a true "
    "zero passes with checked=True"
)


def dependence_error(part: str) -> ValueError:
    return ValueError(f"the gradient does not depend on the private part ({part}): {CUT}")


def gradient_error() -> ValueError:
    return ValueError(f"the loss does not depend on any trainable parameter: {CUT}")


_BEYOND = (  # what PyTorch says, and of what
    (("Sparse", "sparse"), "it has sparse gradients: use nn.Embedding(..., sparse=False)"),
    (("vmap", "functorch", "transform", "torch.func"), "torch.func cannot take it record by record"),
)


def explain_torch_error(error: RuntimeError) -> models.ModelError | None:
    """Returns an error that explains what PyTorch cannot differentiate per record, or twice; None for other errors."""
    if isinstance(error, torch.OutOfMemoryError):
        return None
    message = str(error)
    for words, why in _BEYOND:
        if any(word in message for word in words):
            return models.ModelError(f"this model cannot be differentiated: {why} ({message.splitlines()[0][:200]})")
    return None


def explain_dtype_error(error: RuntimeError, model: nn.Module, inputs: Any, targets: Any) -> ValueError | None:
    """Returns an error that explains a float64 batch with a float32 model, or unsuitable targets; otherwise None."""
    if models.is_about_checkpointing(error):
        return ValueError(models.CHECKPOINTING)
    why = models.describe_input_dtype(error, model, inputs)
    if why is None and any(word in str(error) for word in ("target", "Long", "nll_loss")):  # by version and device
        why = models.describe_target_dtype(error, targets)
    return None if why is None else ValueError(why)
