"""The queue of a sweep: an Optuna study whose trials are the attempts at its settings.

Every setting has a slot, and every attempt at it is one Optuna trial: enqueued, popped by a worker, kept alive by
heartbeats, and then COMPLETE or FAIL. Trials whose heartbeat stopped are failed by Optuna. Whoever starts, or finds the
queue empty, enqueues the slots again that have no waiting, running or complete trial and may be tried again.

Guarantee:
    - No setting is lost: a slot that is neither complete nor given up is enqueued again.
    - No setting is finished twice: slots are enqueued under a lock, so that each has at most one trial that is
      waiting, running or complete, and Optuna does not change the state of a finished trial.

What Optuna lacks for this, shown by tests/sweep/test_queue.py, is in `Queue.claim`, `Queue.refill`, `Heartbeats`,
`Queue._correct_clock` and `database.prepare_engine`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import optuna
import sqlalchemy as sql
from optuna.trial import FrozenTrial, TrialState

from reconbound._internal.checks import DataError, InputError
from reconbound._internal.files import json_digest
from reconbound.sweep import database
from reconbound.sweep.space import Setting, key
from reconbound.training.checkpoint import plain_json

ERRORS = 3  # a setting that raised this many errors has failed
DEATHS = 50  # and so has one on which this many workers died
#: Optuna's own errors on tables that somebody edited; JSON can be too deep to be read.
_DAMAGED = (LookupError, TypeError, AttributeError, ValueError, RecursionError, AssertionError)
_HEARTBEATS = sql.table("trial_heartbeats", sql.column("heartbeat", sql.DateTime))


class Slot:
    """A setting of the sweep and its attempts, as they are now.

    Args:
        number: in the order in which settings were added.
        attempts: Optuna's trials, in order.

    Attributes:
        number: in the order in which settings were added.
        attempts: Optuna's trials, in order.
        complete: the attempt that was finished, or None.
        setting: that of the finished attempt, otherwise of the last one; None while a search has not chosen it.
        failure: why the setting was given up; None while it may be tried again.
        is_over: whether the setting is finished or given up.
        is_missing: whether the setting must be enqueued again.
        done: the steps that the last attempt has reported.
    """

    def __init__(self, number: int, attempts: Sequence[FrozenTrial]) -> None:
        self.number, self.attempts = number, tuple(attempts)
        self.complete = next((trial for trial in attempts if trial.state == TrialState.COMPLETE), None)
        chosen = [*reversed(attempts)] if self.complete is None else [self.complete]
        self.setting: Setting | None = next(
            (trial.user_attrs["setting"] for trial in chosen if "setting" in trial.user_attrs), None
        )
        self.done = int(attempts[-1].user_attrs.get("done", 0))
        failed = [trial.user_attrs for trial in attempts if trial.state == TrialState.FAIL]
        errors = [facts for facts in failed if "error" in facts]
        deaths = sum("error" not in facts and "released" not in facts for facts in failed)
        self.failure = f"{deaths} workers died on it" if deaths >= DEATHS else None
        if len(errors) >= ERRORS or any(facts.get("final") for facts in errors):
            self.failure = str(errors[-1]["error"])
        self.is_over = self.complete is not None or self.failure is not None
        self.is_missing = not self.is_over and all(trial.state.is_finished() for trial in attempts)


@dataclass(frozen=True)
class Claim:
    """An attempt that this worker has.

    Attributes:
        trial_id: Optuna's id of the trial.
        slot: the number of the slot.
        setting: None in a search while it is not chosen yet.
    """

    trial_id: int
    slot: int
    setting: Setting | None


class Exploded(RuntimeError):
    """The parameters of a training, or its leakage, are no longer finite."""


class TrialLost(Exception):
    """Others took this worker for dead, and its trial is failed."""


class Queue:
    """The study of one sweep.

    Args:
        url: of a SQLite file or a PostgreSQL database, as SQLAlchemy writes it.
        name: of the study.
        grace: seconds after which a worker without a heartbeat is taken for dead; the same for all workers.
        sampler: Optuna's, for a search.
        objectives: the number of values that a search maximises.
        reading: the sweep must exist, and nothing is written: the database is opened for reading only.
    """

    def __init__(
        self, url: str, name: str, *, grace: int = 60, sampler: Any = None, objectives: int = 2, reading: bool = False
    ) -> None:
        self.url, self.name, self.grace = database.checked_url(url), name, grace
        self.shown, self._clock_reported = database.shown_url(self.url), False
        self._popped: Claim | None = None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            if reading:
                self._open(skip_table_creation=True, engine_kwargs=database.engine_options(self.url, reading=True))
                self.study = optuna.load_study(storage=self.storage, study_name=name)
            else:
                with database.exclusive_lock(self.url):
                    database.check_whole(self.url)
                    self._open(engine_kwargs=database.engine_options(self.url))
                    database.prepare_engine(self.storage.engine)
                    self.study = optuna.create_study(
                        storage=self.storage,
                        study_name=name,
                        sampler=sampler,
                        directions=["maximize"] * objectives,
                        load_if_exists=True,
                    )
        except KeyError:
            self.dispose()
            raise InputError("name", f"must be that of a sweep in {self.shown}", name) from None
        except (sql.exc.SQLAlchemyError, optuna.exceptions.OptunaError, RuntimeError, ImportError, OSError) as reason:
            self.dispose()
            driver = f"; say {database.POSTGRES}, after pip install 'reconbound[postgres]'"
            why = f"{database.first_line(reason)}{driver if isinstance(reason, ImportError) else ''}"
            raise InputError("storage", f"must be a database that can be used ({why})", self.shown) from reason

    def _open(self, **options: Any) -> None:
        url = self.url.render_as_string(hide_password=False)
        with without_experimental_warnings():
            self.storage = optuna.storages.RDBStorage(url, heartbeat_interval=1, grace_period=self.grace, **options)

    def slots(self) -> list[Slot]:
        """Returns the slots of the sweep, with all attempts as they are now."""
        found: dict[int, list[FrozenTrial]] = {}
        try:
            trials = self.study.get_trials(deepcopy=False)
        except _DAMAGED as reason:
            raise self._damage_error(reason) from None
        for trial in trials:
            number = trial.user_attrs.get("slot")
            if type(number) is not int:
                raise DataError(f"{self.shown} holds the sweep of an earlier version, or another program's study")
            if (
                type(trial.user_attrs.get("done", 0)) is not int
                or type(trial.user_attrs.get("setting", {})) is not dict
            ):
                raise DataError(f"{self.shown} is damaged: setting {number} has other facts than reconbound's")
            found.setdefault(number, []).append(trial)
        if sorted(found) != list(range(len(found))):
            raise DataError(f"{self.shown} is damaged: trials are missing")
        return [Slot(number, found[number]) for number in sorted(found)]

    def _damage_error(self, reason: Exception) -> DataError:
        return DataError(f"{self.shown} is damaged ({type(reason).__name__}: {database.first_line(reason)})")

    # --- filling the queue ------------------------------------------------------------------

    def begin(self, facts: Mapping[str, Any], settings: Sequence[Setting], searched: int = 0) -> None:
        """Stores the facts of the sweep, or checks them against the storage, and enqueues new settings.

        If it is killed in the middle and called again, it continues.

        Args:
            facts: what must stay the same as long as the sweep lives.
            settings: those of a grid.
            searched: the number of settings that a search chooses.
        """
        facts = {**facts, "grace": self.grace}
        with database.exclusive_lock(self.url):
            slots = self.slots()
            try:
                earlier = self.study.user_attrs.get("sweep")
            except _DAMAGED as reason:
                raise self._damage_error(reason) from None
            if earlier is None:
                self.study.set_user_attr("sweep", facts)
            elif not isinstance(earlier, dict):
                raise DataError(f"{self.shown} is damaged: the facts of its sweep are no object")
            else:
                self._check_same(earlier, facts)
            known = {key(slot.setting) for slot in slots if slot.setting is not None}
            new = [setting for setting in settings if key(setting) not in known]
            for number, setting in enumerate([*new, *[None] * (searched - len(slots))], start=len(slots)):
                self._enqueue(number, setting)
        self.refill()

    def _check_same(self, earlier: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        for name, value in facts.items():
            if earlier.get(name) == value:
                continue
            whose, was = f"the sweep {self.name!r} in {self.shown}", earlier.get(name)
            if name == "together":
                what = f"must be {'given' if was else 'left out'}, as when {whose} began"
                raise InputError(name, what, "a number" if value else "none")
            if name == "seed":
                what = f"must be that of {whose}: copy the file seed from the folder where it began"
                raise InputError(name, what, "another")
            raise InputError(name, f"must stay that of {whose}, {was!r}", value)

    def _enqueue(self, slot: int, setting: Setting | None) -> None:
        facts = {"slot": slot} if setting is None else {"slot": slot, "setting": setting}
        self.study.enqueue_trial(setting or {}, user_attrs=facts)

    def refill(self) -> int:
        """Enqueues the settings that have no waiting, running or complete trial. Returns how many there were.

        Optuna's RetryFailedTrialCallback loses a setting when its worker is killed between failing the dead worker's
        trial and adding the next one.
        """
        if not any(slot.is_missing for slot in self.slots()):
            return 0
        with database.exclusive_lock(self.url):
            missing = [slot for slot in self.slots() if slot.is_missing]
            for slot in missing:
                self._enqueue(slot.number, slot.setting)
        return len(missing)

    def recover(self) -> int:
        """Fails the trials of dead workers and refills the queue. Returns the number of settings enqueued."""
        self._correct_clock()
        with without_experimental_warnings():
            optuna.storages.fail_stale_trials(self.study)
        return self.refill()

    def _correct_clock(self) -> None:
        """Sets heartbeats of the future to now: after a clock was set back, Optuna would wait for them to pass."""
        with self.storage.engine.begin() as connection:
            now = connection.execute(sql.select(sql.func.now())).scalar_one().replace(tzinfo=None)
            future = _HEARTBEATS.c.heartbeat > now + timedelta(seconds=1)
            changed = connection.execute(sql.update(_HEARTBEATS).where(future).values(heartbeat=now)).rowcount
        if changed and not self._clock_reported:
            database.notify(
                "the clock was set back: a worker that died before counts as dead once the grace period has passed"
            )
            self._clock_reported = True

    # --- one attempt ------------------------------------------------------------------------

    def claim(self, owner: str) -> Claim | None:
        """Pops the first waiting trial; None if there is none now.

        This is not `Study.ask`, which creates a trial when others have just emptied the queue, and whose trial has no
        heartbeat at first: Optuna never fails it if the worker is killed then.

        Args:
            owner: the worker's name.
        """
        while True:
            self._popped = self._popped or self._pop()
            if self._popped is None:
                return None
            claim = self._popped  # kept for the next call if the database goes away before the trial has its owner
            with suppress(RuntimeError):  # raised by Optuna for a trial that is finished: others took it for stale
                self.set_fact(claim, "owner", owner)
                self._popped = None
                return claim
            self._popped = None

    def _pop(self) -> Claim | None:
        """Sets the first waiting trial to running, after its first heartbeat."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            self.storage.record_heartbeat(trial._trial_id)
            try:
                if self.storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING):
                    return Claim(trial._trial_id, trial.user_attrs["slot"], trial.user_attrs.get("setting"))
            except RuntimeError:  # finished
                continue
            if self.storage.get_trial(trial._trial_id).state == TrialState.WAITING:
                raise self._refusal(trial.user_attrs["slot"], "to begin")
        return None

    def beat(self, claim: Claim, done: int) -> bool:
        """Records a heartbeat and the number of steps done. Returns False if the trial is finished by now."""
        try:
            self.storage.set_trial_user_attr(claim.trial_id, "done", done)
        except RuntimeError:
            return False
        self.storage.record_heartbeat(claim.trial_id)
        return True

    def set_fact(self, claim: Claim, name: str, value: Any) -> None:
        """Stores a fact with the trial: anything that JSON can hold."""
        self.storage.set_trial_user_attr(claim.trial_id, name, value)

    def finish(self, claim: Claim, rows: Sequence[Mapping[str, Any]], values: Sequence[float]) -> bool:
        """Stores a trial's rows and completes it. Returns False if others failed it in the meantime.

        Args:
            claim: the trial.
            rows: its results.
            values: the numbers that a search maximises.
        """
        plain = plain_json([dict(row) for row in rows])
        try:
            self.set_fact(claim, "rows", plain)
            self.set_fact(claim, "sha256", seal_of(claim.slot, claim.setting, plain))
            kept = self.storage.get_trial(claim.trial_id).user_attrs  # Optuna gives no error where the tables refuse it
            if kept.get("rows") != plain or "sha256" not in kept:
                raise self._refusal(claim.slot, "to keep the rows of")
            self._end(claim, TrialState.COMPLETE, values)
        except database.SweepStopped:
            raise
        except RuntimeError:
            return False
        return True

    def fail(self, claim: Claim, error: Exception, *, final: bool = False) -> None:
        """Fails a trial by an error of its setting.

        Args:
            claim: the trial.
            error: the error.
            final: whether another attempt would end in the same way.
        """
        self._fail(claim, {"error": f"{type(error).__name__}: {error}", "final": final})

    def release_owner(self, owner: str, why: str | None = None) -> None:
        """Fails all trials of a worker at once.

        Args:
            owner: the worker's name.
            why: the reason; None for a worker that died, which counts against the settings (DEATHS).
        """
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if trial.user_attrs.get("owner") == owner:
                claim = Claim(trial._trial_id, trial.user_attrs["slot"], None)
                self._fail(claim, {} if why is None else {"released": why})

    def _fail(self, claim: Claim, facts: Mapping[str, Any]) -> None:
        try:
            for name, value in facts.items():
                self.set_fact(claim, name, value)
            self._end(claim, TrialState.FAIL)
        except database.SweepStopped:
            raise
        except RuntimeError:  # finished by now
            pass

    def _end(self, claim: Claim, state: TrialState, values: Sequence[float] | None = None) -> None:
        if not self.storage.set_trial_state_values(claim.trial_id, state, values):  # where the tables refuse it
            raise self._refusal(claim.slot, "to end")

    def _refusal(self, slot: int, what: str) -> database.SweepStopped:
        refused = f"the database {self.shown} refused {what} setting {slot}"
        return database.SweepStopped(f"{refused}, as if it was edited by hand: {database.REPAIR}")

    def dispose(self) -> None:
        """Closes the connections, whether or not the database answers."""
        with suppress(Exception):
            self.storage.scoped_session.remove()
        with suppress(Exception):
            self.storage.engine.dispose()


class Heartbeats:
    """Keeps trials alive from a thread of its own while they are trained.

    Optuna's own thread ends at the first error of a database.

    Args:
        queue: the sweep's queue.
        claims: the trials.
    """

    def __init__(self, queue: Queue, claims: Sequence[Claim]) -> None:
        self.queue, self.claims = queue, claims
        self.done, self.lost = [0] * len(claims), [False] * len(claims)
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Heartbeats:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def report(self, which: Sequence[int], done: int) -> None:
        """Records the steps that these trials have done. Raises TrialLost if all trials are lost.

        Args:
            which: positions of the trials.
            done: the number of steps.
        """
        for k in which:
            self.done[k] = done
        if all(self.lost):
            raise TrialLost

    def _beat(self) -> None:
        while not self._stop.wait(min(self.queue.grace / 4, 5.0)):
            for k, claim in enumerate(self.claims):
                with suppress(Exception):  # out of reach for the moment: the next attempt may succeed
                    self.lost[k] = self.lost[k] or not self.queue.beat(claim, self.done[k])


def seal_of(slot: int, setting: Any, rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the digest that is stored with rows: databases do not detect a flipped bit by themselves.

    Args:
        slot: the number of the slot.
        setting: of the slot.
        rows: of the slot.
    """
    return json_digest([slot, setting, [dict(row) for row in rows]])


@contextmanager
def without_experimental_warnings() -> Iterator[None]:
    """Hides that Optuna calls heartbeats and, in early versions, constant_liar experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield
