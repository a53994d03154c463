"""FisherAccountant: the information that a training run gives about each record, summed over steps, averaged over runs.

Composition (Theorem 3): the information of the run is the sum over steps of the expected conditional information, so
a run's sum is an unbiased estimate of it, and runs are averaged. Subsampling: the exact Poisson factors, the fixed-
size factor, or the paper's κ for comparison. The ledger is as secret as the data: only its owner may read the saved
file. Derivations: docs/theory/accounting.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from reconbound._internal.checks import InputError, file_path, flag, number, warn_user, whole
from reconbound._internal.files import CONFIDENTIAL, Unreadable, sealed, unsealed, write_whole
from reconbound._internal.fingerprints import NAME as FINGERPRINTS
from reconbound._internal.fingerprints import Fingerprints
from reconbound.accounting.confidence import FEWEST, WIDEST
from reconbound.accounting.feature_ledger import Chosen, Diagonal, FeatureLedger
from reconbound.accounting.readings import Readings
from reconbound.accounting.record_ledger import RecordLedger, check_information, check_type, checked_records
from reconbound.accounting.spec import Account, checked_counts, checked_device, checked_scale
from reconbound.fisher import StepInformation
from reconbound.validate.model import ReconboundWarning


class FisherAccountant(Readings):
    """A ledger of Fisher information for every record of a data set, over the steps of a run and over runs.

    Args:
        account: the mechanism, the data's size and the rules.
        diagonal: the per-feature ledgers, under the first rule: "none", "all" (records × features numbers), "average"
            (over records), or a few records and the average: their indices, or ("top", k) or a Chosen for the records
            that the first runs show to be most (and least) exposed, measured in the runs after them. "auto" or
            ("auto", bytes): "all" where it fits, otherwise Chosen().
        spectral: also keep the sum of the steps' spectral norms, under the first rule.
        feature_scale: size of one unit of the model's input in the data's own units, one number or one per feature.
        keep_runs_at: step counts, ascending, at which the dFIL of each run is kept; the last is the run's.
        device: where the ledger lives.

    Attributes:
        caveats: what must be stated with every floor of this ledger, collected from what is added to it.
        needs_range: whether `guarantee` requires low and high: the private part is not known to lie in [0, 1].

    Guarantee: `dfil` estimates without bias an upper bound of Tr I(z)/d for an attacker who knows all other records and
    sees every noisy step; with rule "exact" it is that value itself. One run is one draw of a random sum: for a
    confidence statement use `upper` after two runs or more. Rule "paper" is for comparison and guarantees nothing.
    """

    def __init__(
        self,
        account: Account,
        *,
        diagonal: Diagonal = "none",
        spectral: bool = False,
        feature_scale: float | Sequence[float] | Tensor = 1.0,
        keep_runs_at: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        if not isinstance(account, Account):
            raise InputError("account", "must be an Account", account)
        self.account, self.device = account, checked_device(device)
        kept = checked_counts("keep_runs_at", keep_runs_at)
        if kept and kept[-1] != account.steps:
            raise InputError("keep_runs_at", f"must end with the account's {account.steps} steps", kept)
        self.traces = RecordLedger(account, self.device, spectral=flag("spectral", spectral), keep_at=kept)
        self.features = FeatureLedger(account, diagonal, self.device)
        self.feature_scale = checked_scale(feature_scale, account.features)
        self._fingerprints = Fingerprints()
        self.caveats: tuple[str, ...] = ()
        self.needs_range = False
        self._warned: dict[str, int] = {}  # subject → the number of runs at its last warning

    def __repr__(self) -> str:
        a, runs = self.account, f"{self.runs:,} run{'' if self.runs == 1 else 's'} finished"
        size = f"{a.records:,} records of {a.features:,} features, {a.steps:,} steps"
        return f"FisherAccountant({size}, rules {', '.join(a.rules)}, diagonal {self.diagonal!r}, {runs})"

    @property
    def fingerprints(self) -> list[str]:
        """Returns the fingerprints of the finished runs, one for each; a run can be in a ledger only once."""
        return self._fingerprints.finished

    # --- writing ---------------------------------------------------------------------

    def add(
        self, indices: Tensor | Sequence[int], found: StepInformation, *, weight: float = 1.0, stratified: bool = False
    ) -> None:
        """Adds one step's information about these records.

        Args:
            indices: the records, (B,), each at most once. Those of masked rows (padding) may be anything.
            found: the step's information about them.
            weight: q over the chance of a record to be measured at this step: 1 when they are those of the batch,
                1/p when that is done at a share p of the steps, L·q when each record is measured once in L steps.
            stratified: the last of these: each record is measured exactly once in each block of steps. Not with
                shuffled epochs, where the parameters at a step depend on whether the record was seen already.
        """
        rate = self.account.sample_rate
        if number("weight", weight, above=0.0) < rate * (1 - 1e-9):
            why = f"must be at least the sample rate, {rate:g}, which is divided by a chance to make it"
            raise InputError("weight", why, weight)
        if flag("stratified", stratified) and self.account.sampler == "shuffle":
            raise InputError("stratified", "must be False with shuffled epochs: measure the batches themselves", True)
        index, found = checked_records(indices, found, self.account.records)
        if index.numel() == 0:
            return
        self._check_information(index, found)
        index = index.to(self.device, torch.int64)
        across, along = self.traces.add(index, found, float(weight), stratified)
        self.features.add(index, found, across, along)

    def _check_information(self, index: Tensor, found: StepInformation) -> None:
        """Refuses information that does not fit before anything is changed; keeps its caveats otherwise."""
        check_information(self.account, index, found)
        if "spectral" in self.traces.state and found.spectral_bound is None:
            raise InputError("found", "must have the spectral norm: this ledger keeps it", None)
        self.features.check_found(found)
        self.caveats = joined(self.caveats, found.caveats)
        self.needs_range = self.needs_range or found.part == "module"
        self._fingerprints.touch()

    def follow(self, found: StepInformation) -> None:
        """Adds one step's information about the features of all chosen records, in the order of `rows`.

        For a learner that measures them at every step, whether drawn or not, after `features.followed` was set.

        Args:
            found: the step's information about the chosen records.
        """
        check_type(found)
        rows = self.rows if self.diagonal == "chosen" else None
        if rows is None or len(found.clipped_norm) != len(rows):
            have = "no" if rows is None else len(rows)
            raise InputError("found", f"must be about the {have} records that were chosen", len(found.clipped_norm))
        if found.mask is not None and not bool((found.mask != 0).all()):
            raise InputError("found", "must be about records that took part, not masked ones", found.mask.tolist())
        self._check_information(rows, found)
        factors = self.traces.factors(self.account.rules[0], found.clipped_norm)
        across, along = (self.account.sample_rate * factor for factor in factors)
        self.features.follow(found, across, along)

    def begin_run(self, fingerprint: str) -> None:
        """Names the run that is measured from now on. Without this call its fingerprint is random.

        Args:
            fingerprint: 32 hexadecimal digits, the same for the same training wherever it is repeated. One that is in
                the ledger already is refused.
        """
        self._fingerprints.begin(fingerprint)

    def keep_step(self, step: int) -> None:
        """Keeps the present run's information if this is one of `keep_runs_at`. Call it after each step.

        Args:
            step: the number of steps taken in this run.
        """
        self.traces.keep_step(whole("step", step))

    def finish_run(self) -> None:
        """Closes the current run: adds it to the averages over runs and starts an empty ledger.

        Warns where the measurements cover another number of steps than the account's, or other records than the runs
        before, by more than chance.
        """
        fault = self.traces.describe_missing()
        if fault:
            cure = "the right weight, or an Account with the steps that were taken and the records that are measured"
            warn_user(f"{fault}. Use {cure}", ReconboundWarning)
        self._fingerprints.finish()
        self.traces.finish_run()
        self.features.finish_run()
        self.features.choose(self.trace(), self.traces.measurements())

    def merge(self, other: FisherAccountant) -> None:
        """Adds the finished runs of another ledger of the same account (other machines, other seeds).

        Refuses runs that this ledger already has: in a copy, in what both were merged from, or trained again.

        Args:
            other: the other ledger.
        """
        if not isinstance(other, FisherAccountant):
            raise InputError("other", "must be a FisherAccountant", other)
        if other is self:
            raise InputError("other", "must be another ledger, with runs of its own", "the same one")
        alike = other.traces.state.keys() == self.traces.state.keys() and self.features.same_parts(other.features)
        if other.account != self.account or other.traces.keep_at != self.traces.keep_at or not alike:
            raise InputError("other", "must be a ledger of the same account, with the same parts", other.account)
        if not torch.equal(self.feature_scale, other.feature_scale):
            raise InputError("other", "must have the same feature_scale", other.feature_scale)
        self._fingerprints.check_apart(other._fingerprints)
        if other.runs == 0:
            return
        self.caveats, self.needs_range = joined(self.caveats, other.caveats), self.needs_range or other.needs_range
        self.traces.merge(other.traces)
        self.features.merge(other.features)
        self._fingerprints.finished.extend(other.fingerprints)

    # --- keeping -----------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Returns a copy of the ledger's tensors, on the CPU."""
        found = {name: value.cpu().clone() for name, value in (self.traces.state | self.features.state).items()}
        return {**found, FINGERPRINTS: self._fingerprints.tensor()}

    def restore(self, tensors: Mapping[str, Tensor], runs: int) -> None:
        """Restores what `state` returned; shapes are checked before anything is changed.

        Args:
            tensors: the ledger's tensors.
            runs: the number of finished runs.
        """
        if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
            got = f"a {type(tensors).__name__}"
            raise InputError("tensors", "must be a dictionary of tensors, as `state` returns", got)
        fingerprints = self._fingerprints.restored(tensors, whole("runs", runs, at_least=0))
        parts = (self.traces, self.features)
        for part in parts:
            part.check(tensors)
        for part in parts:
            part.restore(tensors, runs)
        self._fingerprints = fingerprints

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the ledger to a file: safetensors, atomically, mode 0600, marked confidential.

        Args:
            path: the file to write.
        """
        facts: dict[str, Any] = {"account": asdict(self.account), "runs": self.runs, "diagonal": self.diagonal}
        facts |= {"rows": [] if self.rows is None else self.rows.tolist(), "caveats": list(self.caveats)}
        facts |= {"keep_runs_at": list(self.traces.keep_at), "followed": self.features.followed}
        facts |= {"needs_range": self.needs_range}
        if self.features.choice is not None:
            facts["choice"] = asdict(self.features.choice)
        tensors = {**self.state(), "feature_scale": self.feature_scale}
        write_whole(file_path("path", path), sealed(tensors, {"ledger": facts}), mode=CONFIDENTIAL)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> FisherAccountant:
        """Reads a ledger that `save` wrote; anything else is refused with the reason.

        Args:
            path: the file that `save` wrote.
            device: where the ledger will live.
        """
        path, where = file_path("path", path), checked_device(device)
        try:
            tensors, content = unsealed(path)
        except (IsADirectoryError, Unreadable) as reason:
            raise InputError("path", f"must be a ledger that reconbound saved ({reason})", path) from None
        try:
            return cls._from_file(tensors, content["ledger"], where)
        except (LookupError, TypeError, AttributeError, ValueError) as reason:  # its digest is right
            why = f"({type(reason).__name__}: {' '.join(str(reason).split())[:200]})"
            raise InputError(
                "path", f"must be a ledger of this version of reconbound: measure again {why}", path
            ) from None

    @classmethod
    def _from_file(cls, tensors: dict[str, Tensor], facts: Mapping[str, Any], device: torch.device) -> FisherAccountant:
        """Returns the ledger of a file's tensors and facts. Raises errors of many kinds where they do not fit."""
        account = Account(**{**facts["account"], "rules": tuple(facts["account"]["rules"])})
        kind, few = facts["diagonal"], Chosen(**facts.get("choice", {}))
        for size, tensor in ((account.records, tensors["trace"]), (account.features, tensors.get("diagonal"))):
            if tensor is not None and tensor.shape[-1] != size:  # before so much memory is taken
                raise InputError("account", f"must be of tensors of length {tensor.shape[-1]}", size)
        ledger = cls(
            account,
            diagonal={"some": facts["rows"], "chosen": few}.get(kind, kind),
            spectral="spectral" in tensors,
            feature_scale=tensors.pop("feature_scale"),
            keep_runs_at=facts["keep_runs_at"],
            device=device,
        )
        ledger.restore(tensors, facts["runs"])
        ledger.features.followed, ledger.needs_range = facts["followed"], facts["needs_range"]
        ledger.caveats = tuple(facts["caveats"])
        return ledger


def joined(*caveats: Sequence[str]) -> tuple[str, ...]:
    """Returns all caveats, each once, in order."""
    return tuple(dict.fromkeys(c for some in caveats for c in some))


__all__ = ["FEWEST", "WIDEST", "Account", "Chosen", "FisherAccountant"]
