"""Settings of a private run: everything that determines it, apart from the model and the data."""

from __future__ import annotations

from dataclasses import dataclass, field

from reconbound._internal.checks import choice, number, plain_number, whole
from reconbound._internal.rng import checked_seed
from reconbound.accounting.measurement_plan import Budget, checked_budget
from reconbound.accounting.spec import checked_rules
from reconbound.fisher import Clip


@dataclass(frozen=True)
class Settings:
    """Everything that determines a run, apart from the model and the data.

    Attributes:
        noise_multiplier: standard deviation of the noise on the sum over max_grad_norm.
        max_grad_norm: the clip norm C.
        sample_rate: q.
        sampler: "poisson", "fixed" or "shuffle".
        clip: "smooth" or "hard".
        lr: learning rate of the default optimizer, torch's SGD.
        momentum: momentum of the default optimizer.
        weight_decay: weight decay of the default optimizer.
        rules: subsampling factors to keep ledgers for (see Account); None to train without accounting.
        budget: what accounting may cost (see accounting/measurement_plan.py). A number: records measured over records
            trained on, each once in a block of 1/(q·budget) steps (and once in a shorter run, which then costs more).
            "every": the batch itself at every step. ("steps", p): the batch itself at a random share p of the steps.
            With shuffled epochs a number p below 1 means ("steps", p), otherwise "every".
        probes: Gaussian probes for each measurement.
        seed: from the operating system when None. A given seed makes a run repeatable and is as secret as the data:
            whoever guesses it can subtract the noise. Do not set it for a release.
        micro_batch: records processed at a time, to limit memory; None for all.
    """

    noise_multiplier: float
    max_grad_norm: float
    sample_rate: float
    sampler: str = "poisson"
    clip: Clip = "smooth"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    rules: tuple[str, ...] | None = ()
    budget: Budget = 0.15
    probes: int = 1
    seed: int | None = field(default=None, repr=False)
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        number("noise_multiplier", self.noise_multiplier, above=0.0)
        number("max_grad_norm", self.max_grad_norm, above=0.0)
        number("sample_rate", self.sample_rate, above=0.0, at_most=1.0)
        for name in ("lr", "momentum", "weight_decay"):
            number(name, getattr(self, name), at_least=0.0)
        choice("sampler", self.sampler, ("poisson", "fixed", "shuffle"))
        choice("clip", self.clip, ("smooth", "hard"))
        budget = checked_budget(self.budget)
        if self.sampler == "shuffle" and isinstance(budget, float):
            # within an epoch the parameters at a step depend on whether a record was seen: only batches can be measured
            budget = ("steps", budget) if budget < 1 else "every"
        object.__setattr__(self, "budget", budget)
        if self.rules is not None:
            object.__setattr__(self, "rules", checked_rules(self.rules))
        if self.seed is not None:
            object.__setattr__(self, "seed", checked_seed(self.seed))
        object.__setattr__(self, "probes", whole("probes", self.probes))
        if self.micro_batch is not None:
            object.__setattr__(self, "micro_batch", whole("micro_batch", self.micro_batch))
        for name in ("noise_multiplier", "max_grad_norm", "sample_rate", "lr", "momentum", "weight_decay"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
