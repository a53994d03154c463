"""The storage of a sweep: an Optuna study, and beside it a table of leases that says which worker has which trial.

One trial is one setting and is created only once. A worker that dies leaves its trial to the next, which continues the
same one. So a setting cannot be lost (its trial stays unfinished until its rows are stored) and cannot be counted twice
(there is one trial for it, and a finished trial cannot be finished again). Optuna's own retry marks a dead worker's
trial as failed and then creates another; if it is killed between the two, it loses the setting.

A lease is taken by one UPDATE that applies only if the old lease has ended, so one of two workers gets it. On SQLite
every transaction takes the write lock when it begins: Optuna reads a trial's state and then writes it, and another
process could otherwise write in between. Time is the server's, or this machine's for SQLite.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import optuna
import sqlalchemy as sql
from optuna.trial import FrozenTrial, TrialState

from reconbound._internal.checks import InputError
from reconbound._internal.files import json_digest
from reconbound.sweep.database import (
    alone,
    check_whole,
    checked_url,
    engine_options,
    locked_from_the_start,
    reading_options,
    shown_url,
)
from reconbound.sweep.faults import SweepStopped, first_line
from reconbound.sweep.words import POSTGRES
from reconbound.training.checkpoint import plain_json

ERRORS = 3  # a trial that raised this many errors has failed
DEATHS = 50  # and so has one on which this many workers died
NEVER = 1e18

_LEASES = sql.Table(
    "reconbound_leases",
    sql.MetaData(),
    sql.Column("trial_id", sql.Integer, primary_key=True, autoincrement=False),
    sql.Column("owner", sql.String(200), nullable=False),
    sql.Column("until", sql.Float, nullable=False),
    sql.Column("claims", sql.Integer, nullable=False),
    sql.Column("errors", sql.Integer, nullable=False),
    sql.Column("done", sql.BigInteger, nullable=False),
)


@dataclass(frozen=True)
class Claim:
    """A trial that one worker has claimed.

    Attributes:
        trial_id: Optuna's id of the trial.
        number: its number in the study.
        owner: the worker's name.
        claims: the number of claims so far: this one and those of workers that died.
        errors: the number of errors raised so far.
    """

    trial_id: int
    number: int
    owner: str
    claims: int
    errors: int


class Store:
    """The study and the leases of one sweep.

    Args:
        url: of a SQLite file or a PostgreSQL database, as SQLAlchemy writes it.
        name: of the study.
        lease: seconds after which a worker that gave no sign is taken for dead.
        sampler: Optuna's, for a search.
        objectives: the number of values that a search maximises.
        reading: the sweep must exist, and nothing is written: the database is opened for reading only.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        lease: float = 60.0,
        sampler: Any = None,
        objectives: int = 2,
        reading: bool = False,
    ) -> None:
        self.url, self.name, self.lease = checked_url(url), name, lease
        self.shown = shown_url(self.url)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            if reading:
                self._open(reading_options(self.url), skip_table_creation=True)
                self.study = optuna.load_study(storage=self.storage, study_name=name)
            else:
                with alone(self.url):
                    check_whole(self.url)
                    self._open(engine_options(self.url))
                    _LEASES.create(self.storage.engine, checkfirst=True)
                    if self.url.get_backend_name() == "sqlite":
                        locked_from_the_start(self.engine)
                    self.study = optuna.create_study(
                        storage=self.storage,
                        study_name=name,
                        sampler=sampler,
                        directions=["maximize"] * objectives,
                        load_if_exists=True,
                    )
        except KeyError:
            raise InputError("name", f"must be that of a sweep in {self.shown}", name) from None
        except (sql.exc.SQLAlchemyError, optuna.exceptions.OptunaError, ImportError, OSError) as reason:
            driver = f"; say {POSTGRES}, after pip install 'reconbound[postgres]'"
            why = f"{first_line(reason)}{driver if isinstance(reason, ImportError) else ''}"
            raise InputError("storage", f"must be a database that can be used ({why})", self.shown) from reason

    def _open(self, options: dict[str, Any], **more: Any) -> None:
        url = self.url.render_as_string(hide_password=False)
        self.storage = optuna.storages.RDBStorage(url, engine_kwargs=options, **more)
        self.engine = self.storage.engine

    # --- making the trials ------------------------------------------------------------

    def begin(self, facts: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> None:
        """Stores the facts of the sweep, or checks them against the storage, and adds missing trials.

        If it is killed in the middle and called again, it continues. Of several processes, one does it.

        Args:
            facts: what must stay the same as long as the sweep lives.
            trials: for each a "slot" (its name), and its "setting", "params" and "distributions" where they are fixed.
        """
        with alone(self.url):
            had = self.study.user_attrs.get("sweep")
            if had is None:
                self.study.set_user_attr("sweep", dict(facts))
            else:
                self._check_same(had, facts)
            there = {trial.user_attrs.get("slot") for trial in self.trials()}
            for trial in trials:
                if trial["slot"] in there:
                    continue
                attributes = {name: trial[name] for name in ("slot", "setting") if name in trial}
                self.study.add_trial(
                    optuna.create_trial(
                        state=TrialState.WAITING,
                        params=trial.get("params"),
                        distributions=trial.get("distributions"),
                        user_attrs=attributes,
                    )
                )

    def _check_same(self, had: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        for name, value in facts.items():
            if had.get(name) == value:
                continue
            whose = f"that of the sweep {self.name!r} in {self.shown}"
            if name == "together":
                was = "be given, as when" if had.get(name) else "be left out, as when"
                raise InputError(
                    name, f"must {was} {whose.removeprefix('that of ')} began", "a number" if value else "none"
                )
            if name == "seed":
                raise InputError(name, f"must be {whose}: copy the file seed from the folder where it began", "another")
            raise InputError(name, f"must stay {whose}, {had.get(name)!r}", value)

    # --- working ------------------------------------------------------------------------

    def claim(self, owner: str) -> Claim | None:
        """Claims the first unfinished trial that nobody has, for this worker only; None if there is none now.

        Args:
            owner: the worker's name.
        """
        held = self.leases()
        now = self.now()
        for trial in self.trials():
            lease = held.get(trial._trial_id)
            if trial.state.is_finished() or (lease is not None and lease.until >= now):
                continue
            if self._take(trial._trial_id, owner):
                return self._begun(trial._trial_id, owner)
        return None

    def _take(self, trial_id: int, owner: str) -> bool:
        columns = _LEASES.c
        with self.engine.begin() as connection:
            now = _now(connection)
            late = sql.update(_LEASES).where(columns.trial_id == trial_id, columns.until < now)
            taken = connection.execute(late.values(owner=owner, until=now + self.lease, claims=columns.claims + 1))
            if taken.rowcount == 1:
                return True
        try:
            with self.engine.begin() as connection:
                first = {"trial_id": trial_id, "owner": owner, "claims": 1, "errors": 0, "done": 0}
                connection.execute(sql.insert(_LEASES).values(until=_now(connection) + self.lease, **first))
        except sql.exc.IntegrityError:
            if trial_id not in self.leases():
                raise  # nobody has it: the table was edited by hand
            return False
        return True

    def _begun(self, trial_id: int, owner: str) -> Claim | None:
        """Returns the claimed trial as it is now, and sets it running; None if it was finished in the meantime."""
        trial = self.storage.get_trial(trial_id)
        lease = self.leases()[trial_id]
        claim = Claim(trial_id, trial.number, owner, lease.claims, lease.errors)
        if trial.state.is_finished():  # its worker died before it closed the lease
            self.close(claim)
            return None
        if trial.state == TrialState.WAITING:
            self.storage.set_trial_state_values(trial_id, TrialState.RUNNING)
        if claim.claims > DEATHS:
            self.fail(claim, f"{DEATHS} workers died on it")
            return None
        return claim

    def beat(self, claim: Claim, done: int) -> bool:
        """Renews the lease and stores the number of steps done. Returns False if another worker has it by now.

        Args:
            claim: the trial.
            done: the number of steps done.
        """
        with self.engine.begin() as connection:
            values = {"until": _now(connection) + self.lease, "done": done}
            return connection.execute(_mine(claim).values(**values)).rowcount == 1

    def finish(self, claim: Claim, rows: Sequence[Mapping[str, Any]], values: Sequence[float], done: int) -> bool:
        """Stores a trial's rows and finishes it. Returns False if the lease was lost or another worker had finished it.

        Args:
            claim: the trial.
            rows: its results.
            values: the numbers that a search maximises.
            done: the number of steps done.
        """
        if not self.beat(claim, done):
            return False
        try:
            plain = plain_json([dict(row) for row in rows])
            setting = self.storage.get_trial(claim.trial_id).user_attrs.get("setting")
            self.storage.set_trial_user_attr(claim.trial_id, "rows", plain)
            self.storage.set_trial_user_attr(claim.trial_id, "sha256", seal_of(claim.number, setting, plain))
            kept = self.storage.get_trial(claim.trial_id).user_attrs  # Optuna gives no error where the tables refuse it
            if kept.get("rows") != plain or "sha256" not in kept:
                raise self._refused(claim, "to keep the rows of")
            self._end(claim, TrialState.COMPLETE, values)
        except SweepStopped:
            raise
        except RuntimeError:  # raised by Optuna for a trial that is finished
            self.close(claim)
            return False
        self.close(claim)  # only now: nobody could claim an unfinished trial that is closed
        return True

    def _end(self, claim: Claim, state: TrialState, values: Sequence[float] | None = None) -> None:
        """Ends a trial. Optuna only returns False where the tables refuse it: its lease must not be closed then."""
        if not self.storage.set_trial_state_values(claim.trial_id, state, values):
            raise self._refused(claim, "to end")

    def _refused(self, claim: Claim, what: str) -> SweepStopped:
        return SweepStopped(
            f"the database {self.shown} refused {what} setting {claim.number}, as if it was edited by hand: bring it "
            "back from a copy, or begin the sweep anew in another folder"
        )

    def note(self, claim: Claim, name: str, value: Any) -> None:
        """Stores a fact with the trial.

        Args:
            claim: the trial.
            name: the name of the fact.
            value: anything that JSON can hold.
        """
        self.storage.set_trial_user_attr(claim.trial_id, name, value)

    def fail(self, claim: Claim, why: str) -> None:
        """Gives a trial up for good. Does nothing if another worker has it by now.

        Args:
            claim: the trial.
            why: the reason, in words.
        """
        with self.engine.begin() as connection:
            if connection.execute(_mine(claim).values(until=_now(connection) + self.lease)).rowcount == 0:
                return
        try:
            self.storage.set_trial_user_attr(claim.trial_id, "error", why)
            self._end(claim, TrialState.FAIL)
        except SweepStopped:
            raise
        except RuntimeError:
            pass
        self.close(claim)

    def close(self, claim: Claim) -> None:
        """Closes the lease of a finished trial, so that nobody claims it again."""
        with self.engine.begin() as connection:
            connection.execute(_mine(claim).values(until=NEVER))

    def release(self, claim: Claim, *, error: bool = False, pause: float = 0.0) -> None:
        """Releases an unfinished trial to the next worker.

        Args:
            claim: the trial.
            error: whether it raised an error.
            pause: seconds before it can be claimed.
        """
        columns = _LEASES.c
        with self.engine.begin() as connection:
            values = {"until": _now(connection) + pause - 1e-3, "claims": columns.claims - 1}
            connection.execute(_mine(claim).values(errors=columns.errors + int(error), **values))

    def expire(self, owner: str) -> None:
        """Releases everything that a worker held that is known to be dead."""
        with self.engine.begin() as connection:
            whose = sql.update(_LEASES).where(_LEASES.c.owner == owner, _LEASES.c.until < NEVER / 2)
            connection.execute(whose.values(until=0.0))

    def take_away(self, lease: Any) -> bool:
        """Ends a lease if it is unchanged. Returns whether it did."""
        columns = _LEASES.c
        same = (columns.trial_id == lease.trial_id, columns.owner == lease.owner, columns.until == lease.until)
        with self.engine.begin() as connection:
            return connection.execute(sql.update(_LEASES).where(*same).values(until=0.0)).rowcount == 1

    # --- looking -------------------------------------------------------------------------

    def trials(self) -> list[FrozenTrial]:
        """Returns all trials as they are now, by number."""
        found: list[FrozenTrial] = self.study.get_trials(deepcopy=False)
        return found

    def leases(self) -> dict[int, Any]:
        """Returns the leases of this sweep's trials and others', by trial."""
        with self.engine.begin() as connection:
            return {row.trial_id: row for row in connection.execute(sql.select(_LEASES))}

    def now(self) -> float:
        """Returns seconds since 1970, by the clock that leases use."""
        with self.engine.begin() as connection:
            return _now(connection)

    def dispose(self) -> None:
        """Closes the connections, whether or not the database answers."""
        with suppress(Exception):
            self.storage.scoped_session.remove()
        with suppress(Exception):
            self.engine.dispose()


def seal_of(number: int, setting: Any, rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the digest that is stored with a finished trial: databases do not detect a flipped bit by themselves.

    Args:
        number: of the trial.
        setting: of the trial.
        rows: of the trial.
    """
    return json_digest([number, setting, [dict(row) for row in rows]])


def _mine(claim: Claim) -> Any:
    return sql.update(_LEASES).where(_LEASES.c.trial_id == claim.trial_id, _LEASES.c.owner == claim.owner)


def _now(connection: Any) -> float:
    if connection.dialect.name == "sqlite":
        return time.time()
    return float(connection.execute(sql.text("SELECT extract(epoch FROM clock_timestamp())")).scalar())
