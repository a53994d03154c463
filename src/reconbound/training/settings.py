"""Settings of a private run: everything that determines it, apart from the model and the data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reconbound._internal.checks import InputError, number, plain_number, whole
from reconbound._internal.rng import checked_seed
from reconbound.accounting.measurement_plan import Budget, checked_budget
from reconbound.accounting.spec import MechanismSpec


@dataclass(frozen=True)
class Settings(MechanismSpec):
    """Everything that decides what a run does, apart from the model, the data and the number of steps.

    The first fields are those of MechanismSpec: noise_multiplier, max_grad_norm, sample_rate, sampler, clip, rules.

    Attributes:
        lr: learning rate of the default optimizer, torch's SGD.
        momentum: of the default optimizer.
        weight_decay: of the default optimizer.
        budget: what accounting may cost (accounting/measurement_plan.py). A number: records measured over records
            trained on, each once in a block of 1/(q·budget) steps (and once in a shorter run, which then costs more).
            "every": the batch itself at every step. ("steps", p): the batch itself at a random share p of the steps.
            With shuffled epochs a number p below 1 means ("steps", p), otherwise "every".
        probes: Gaussian probes for each measurement.
        seed: from the operating system when None. A given one makes a run repeatable and is as secret as the data:
            whoever guesses it subtracts the noise. Do not set it for a real release.
        micro_batch: records at a time, for memory; None for all.
    """

    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    budget: Budget = 0.15
    probes: int = 1
    seed: int | None = field(default=None, repr=False)
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lr", "momentum", "weight_decay"):
            number(name, getattr(self, name), at_least=0.0)
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        budget = checked_budget(self.budget)
        if self.sampler == "shuffle" and isinstance(budget, float):
            # within an epoch the parameters at a step depend on whether a record was seen: only batches can be measured
            budget = ("steps", budget) if budget < 1 else "every"
        object.__setattr__(self, "budget", budget)
        if self.seed is not None:
            object.__setattr__(self, "seed", checked_seed(self.seed))
        object.__setattr__(self, "probes", whole("probes", self.probes))
        if self.micro_batch is not None:
            object.__setattr__(self, "micro_batch", whole("micro_batch", self.micro_batch))

    @classmethod
    def paper(
        cls, batch_size: int, records: int, *, noise_multiplier: float, max_grad_norm: float, lr: float, **others: Any
    ) -> Settings:
        """Returns the settings of the paper's Algorithm 1.

        Batches have a fixed size, the clip is smooth, all steps are measured, and δ of the factor κ is split over the
        steps. The ledger also keeps the fixed-size factor, which is proved. κ is kept for comparison.

        Args:
            batch_size: records in a batch.
            records: training records.
            noise_multiplier: standard deviation of the noise on the sum over max_grad_norm.
            max_grad_norm: the clip norm C.
            lr: the learning rate.
            others: other fields of Settings; momentum is 0.5 if it is not among them.
        """
        if whole("batch_size", batch_size) > whole("records", records):
            raise InputError("batch_size", f"must be at most the number of records ({records})", batch_size)
        rate = batch_size / records
        kept: dict[str, Any] = {"sampler": "fixed", "rules": ("paper", "fixed"), "budget": "every", "lr": lr}
        return cls(noise_multiplier, max_grad_norm, rate, **{"momentum": 0.5, **kept, **others})
