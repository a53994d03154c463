"""MeasuredRuns: what training runs reveal about each record, taken in step by step, merged over ledgers, and saved.

Composition (Theorem 3): the information of a run is the sum over steps of the expected conditional information. A run's
sum is an unbiased estimate of it, and runs are averaged. Derivations: docs/theory/accounting.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reconbound._internal.checks import InputError, choice, flag, warn_user, whole
from reconbound.accounting.compact import send
from reconbound.accounting.divergence_ledger import DivergenceLedger
from reconbound.accounting.feature_ledger import Diagonal, FeatureLedger
from reconbound.accounting.joining import add_records, check_joinable
from reconbound.accounting.record_ledger import RecordLedger
from reconbound.accounting.spec import (
    Account,
    Fingerprints,
    check_information,
    checked_counts,
    checked_device,
    checked_norms,
    checked_records,
    checked_scale,
    checked_weight,
)
from reconbound.accounting.storage import load_ledger, opened_ledger, save_ledger
from reconbound.fisher import StepInformation
from reconbound.fisher.worlds import StepDistances
from reconbound.validate.model import ReconboundWarning

if TYPE_CHECKING:
    from typing_extensions import Self


class MeasuredRuns:
    """The measurements of training runs, in ledgers of the records, of their features and of divergences.

    FisherAccountant answers from them, and says what they mean.

    Args:
        account: as in FisherAccountant.
        diagonal: as in FisherAccountant.
        spectral: as in FisherAccountant.
        feature_scale: as in FisherAccountant.
        keep_runs_at: as in FisherAccountant.
        worlds: as in FisherAccountant.
        device: as in FisherAccountant.
    """

    def __init__(
        self,
        account: Account,
        *,
        diagonal: Diagonal = "none",
        spectral: bool = False,
        feature_scale: float | Sequence[float] | Tensor = 1.0,
        keep_runs_at: Sequence[int] = (),
        worlds: Sequence[str] | None = (),
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
        self.diagonal = self.features.kind
        self.divergences = DivergenceLedger(account, worlds, self.device, kept)
        self.feature_scale = checked_scale(feature_scale, account.features)
        self._fingerprints = Fingerprints()
        self.caveats: tuple[str, ...] = ()
        self.needs_range = False
        self._warned: dict[str, int] = {}  # subject → the number of runs at its last warning

    def __repr__(self) -> str:
        a, runs = self.account, f"{self.runs:,} run{'' if self.runs == 1 else 's'} finished"
        size = f"{a.records:,} records of {a.features:,} features, {a.steps:,} steps"
        worlds = ", ".join(self.divergences.worlds) or "none"
        rules = ", ".join(a.kept_rules) or "none"
        return f"{type(self).__name__}({size}, worlds {worlds}, rules {rules}, diagonal {self.diagonal!r}, {runs})"

    @property
    def runs(self) -> int:
        """Returns the number of finished runs."""
        return self.traces.runs

    @property
    def rows(self) -> Tensor | None:
        """Returns the records whose features are kept, most exposed first if chosen; None for all or none."""
        return self.features.rows

    @property
    def fingerprints(self) -> list[str]:
        """Returns the fingerprints of the finished runs, one for each; a run can be in a ledger only once."""
        return self._fingerprints.finished

    def _rule(self, rule: str | None) -> int:
        """Returns the place of a rule among those of the account; refuses one that is not among them."""
        if not self.account.kept_rules:
            raise InputError("rule", "cannot be read: this ledger keeps no Fisher information (rules=None)", rule)
        return 0 if rule is None else self.account.kept_rules.index(choice("rule", rule, self.account.kept_rules))

    def _is_first(self, subject: str) -> bool:
        """Returns whether this is the first warning on this subject since the last run ended."""
        before, self._warned[subject] = self._warned.get(subject), self.runs
        return before != self.runs

    # --- writing ---------------------------------------------------------------------

    def add(
        self,
        indices: Tensor | Sequence[int],
        found: StepInformation,
        *,
        weight: float = 1.0,
        stratified: bool = False,
        checked: bool = False,
    ) -> None:
        """Adds one step's information about these records, and what their clipped norms say of "removed".

        Args:
            indices: the records, (B,), each at most once. Those of masked rows (padding) may be anything.
            found: the step's information about them.
            weight: q over the chance of a record to be measured at this step: 1 when they are those of the batch,
                1/p when that is done at a share p of the steps, L·q when each record is measured once in L steps.
            stratified: the last of these: each record is measured exactly once in each block of steps. Not with
                shuffled epochs, where the parameters at a step depend on whether the record was seen already.
            checked: skip the checks, which wait for a GPU: who calls this has measured distinct records of this
                account, without masked rows, with a weight of its plan, and checks that the numbers are finite.
        """
        if checked:
            index = torch.as_tensor(indices)
        else:
            weight = checked_weight(self.account, weight, stratified)
            index, found = checked_records(indices, found, StepInformation, self.account.records)
        if index.numel() == 0:
            return
        self._rule(None)
        if not checked:
            check_information(self.account, index, found)
        self._keep_facts(found)
        index = send(index.to(torch.int64), self.device)
        across, along = self.traces.add(index, found, weight, stratified)
        if self.features.kind != "none":
            self.features.add(index, found, across, along)
        self.divergences.add_information(index, found.clipped_norm, weight, stratified)

    def add_distances(
        self,
        indices: Tensor | Sequence[int],
        found: StepDistances,
        *,
        weight: float = 1.0,
        stratified: bool = False,
        checked: bool = False,
    ) -> None:
        """Adds one step's distances between these records' clipped gradients in the real and in replaced worlds.

        Args:
            indices: as in `add`.
            found: the step's distances, of every replaced world that this ledger keeps.
            weight: as in `add`.
            stratified: as in `add`.
            checked: as in `add`.
        """
        if checked:
            index = torch.as_tensor(indices)
        else:
            weight = checked_weight(self.account, weight, stratified)
            index, found = checked_records(indices, found, StepDistances, self.account.records)
            self.divergences.check_found(index, found)
        if index.numel():
            self._fingerprints.touch()
            self.divergences.add(send(index.to(torch.int64), self.device), found, weight, stratified)

    def add_norms(
        self, indices: Tensor | Sequence[int], clipped_norm: Tensor, *, weight: float = 1.0, stratified: bool = False
    ) -> None:
        """Adds one step's clipped gradient norms, which is all that "removed" needs, in place of those in `add`.

        Args:
            indices: the records, (B,), each at most once.
            clipped_norm: the norm of each record's clipped gradient, (B,).
            weight: as in `add`.
            stratified: as in `add`.
        """
        weight = checked_weight(self.account, weight, stratified)
        index, norms = checked_norms(indices, clipped_norm, self.account)
        if index.numel():
            self._fingerprints.touch()
            self.divergences.add_norms(index.to(self.device, torch.int64), norms, weight, stratified)

    def _keep_facts(self, found: StepInformation) -> None:
        """Refuses information without what is kept, before anything is changed; keeps its caveats otherwise."""
        if "spectral" in self.traces.state and found.spectral_bound is None:
            raise InputError("found", "must have the spectral norm: this ledger keeps it", None)
        if self.features.kind != "none":
            self.features.check_found(found)
        self.caveats = tuple(dict.fromkeys((*self.caveats, *found.caveats)))
        self.needs_range = self.needs_range or found.part == "module"
        self._fingerprints.touch()

    def follow(self, found: StepInformation) -> None:
        """Adds one step's information about the features of all chosen records, in the order of `rows`.

        For a learner that measures them at every step, whether drawn or not, after `features.followed` was set.

        Args:
            found: the step's information about the chosen records.
        """
        check_information(self.account, self.features.check_followed(found), found)
        self._keep_facts(found)
        factors = self.traces.factors(self.account.kept_rules[0], found.clipped_norm)
        across, along = (self.account.sample_rate * factor for factor in factors)
        self.features.follow(found, across, along)

    def begin_run(self, fingerprint: str) -> None:
        """Names the run that is measured from now on. Without this call its fingerprint is random.

        Args:
            fingerprint: 32 hexadecimal digits, the same whenever this training is repeated, and not in the ledger yet.
        """
        self._fingerprints.begin(fingerprint)

    def keep_step(self, step: int) -> None:
        """Keeps the present run's information if this is one of `keep_runs_at`. Call it after each step.

        Args:
            step: the number of steps taken in this run.
        """
        self.traces.keep_step(whole("step", step))
        self.divergences.keep_step(step)

    def finish_run(self) -> None:
        """Closes the current run: adds it to the averages over runs and starts an empty ledger.

        Warns where the run was not measured over all of its steps, or not for the same records as earlier runs.
        """
        missing = self.traces.describe_missing() if self.account.kept_rules else ""
        partial = self.divergences.incomplete()
        if partial and not missing:
            some = ", ".join(map(repr, partial))
            missing = (
                f"a run was not measured over all of its {self.account.steps} steps: divergences to {some} are wrong"
            )
        if missing:
            cure = "the right weight, or an Account with the steps that were taken and the records that are measured"
            warn_user(f"{missing}. Use {cure}", ReconboundWarning)
        self._fingerprints.finish()
        self.divergences.finish_run()
        self.traces.finish_run()
        self.features.finish_run()
        if self.account.kept_rules and self.features.choice is not None:
            self.features.choose(self.traces.mean("trace")[0], self.traces.measurements())

    def merge(self, other: MeasuredRuns | str | os.PathLike[str]) -> None:
        """Adds the finished runs of another ledger of the same account; refuses runs that this ledger already has.

        Args:
            other: the other ledger, or the file that it was saved to, which is then read part by part and needs no
                memory.
        """
        if isinstance(other, str | os.PathLike):
            try:
                with opened_ledger(type(self), other) as stored:
                    self.merge(stored)
            except InputError as reason:
                raise InputError(
                    "other" if reason.name == "path" else reason.name, reason.requirement, reason.value
                ) from None
            return
        self._check_alike(other)
        self._fingerprints.check_apart(other._fingerprints)
        if other.runs == 0:
            return
        self._keep_statements(other)
        self.traces.merge(other.traces)
        self.features.merge(other.features)
        self.divergences.merge(other.divergences)
        self._fingerprints.finished.extend(other.fingerprints)

    def join(self, other: MeasuredRuns) -> None:
        """Adds what the ledger of another rank has measured of other records in the run under way.

        For a training on several ranks, each with a ledger of its own: join them before `finish_run`. Ledgers of
        different runs are joined by `merge`.

        Args:
            other: the ledger of another rank, with the same fingerprint of the run (`begin_run`). It is not changed.

        Guarantee: the ledger is then that of one process with all measurements, to rounding. A record that both have
        measured in this run is refused, so that nothing counts twice.
        """
        self._check_alike(other)
        check_joinable(self, other)
        add_records(self, other)
        self._keep_statements(other)

    def _keep_statements(self, other: MeasuredRuns) -> None:
        self.caveats = tuple(dict.fromkeys((*self.caveats, *other.caveats)))
        self.needs_range = self.needs_range or other.needs_range

    def _check_alike(self, other: Any) -> None:
        """Refuses a ledger of another account, or with other parts."""
        if not isinstance(other, MeasuredRuns):
            raise InputError("other", "must be a FisherAccountant", other)
        if other is self:
            raise InputError("other", "must be another ledger, with runs of its own", "the same one")
        alike = other.traces.state.keys() == self.traces.state.keys() and self.features.same_parts(other.features)
        alike = alike and other.divergences.worlds == self.divergences.worlds
        if other.account != self.account or other.traces.keep_at != self.traces.keep_at or not alike:
            raise InputError("other", "must be a ledger of the same account, with the same parts", other.account)
        if not torch.equal(self.feature_scale, other.feature_scale):
            raise InputError("other", "must have the same feature_scale", other.feature_scale)

    # --- keeping -----------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Returns a copy of the ledger's tensors, on the CPU."""
        return {name: value.cpu().clone() for name, value in self.tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the ledger's tensors themselves, to be read before anything is added to it."""
        self.divergences.settle()
        parts = self.traces.state | self.features.state | self.divergences.state
        return {**parts, "fingerprints": self._fingerprints.tensor()}

    def restore(self, tensors: Mapping[str, Tensor], runs: int, *, copy: bool = True) -> None:
        """Restores what `state` returned; shapes are checked before anything is changed.

        Args:
            tensors: the ledger's tensors.
            runs: the number of finished runs.
            copy: whether the tensors are somebody else's too; otherwise they become the ledger's own.
        """
        if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
            why = "must be a dictionary of tensors, as `state` returns"
            raise InputError("tensors", why, f"a {type(tensors).__name__}")
        fingerprints = self._fingerprints.restored(tensors, whole("runs", runs, at_least=0))
        parts = (self.traces, self.features, self.divergences)
        for part in parts:
            part.check(tensors)
        for part in parts:
            part.restore(tensors, runs, copy=copy)
        self._fingerprints = fingerprints

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the ledger to a file: safetensors, atomically, in parts, mode 0600, marked confidential.

        Args:
            path: the file to write.
        """
        save_ledger(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Self:
        """Reads a ledger that `save` wrote; anything else is refused with the reason.

        Args:
            path: the file that `save` wrote.
            device: where the ledger will live.
        """
        return load_ledger(cls, path, device)
