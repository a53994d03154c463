"""Where a sweep is kept: an Optuna study, and beside it a table of leases that says who is at work on which trial.

One trial is one setting, made once and never made again: a worker that dies leaves its trial to the next, which goes on
with the same one. So a setting cannot be lost (its trial stays unfinished until its rows are in) and cannot be counted
twice (there is one trial for it, and a finished trial cannot be finished again). Optuna's own retry marks a dead
worker's trial as failed and then makes another; killed between the two, it loses the setting.

A lease is taken by one UPDATE that holds only while the old one has run out, so of two workers one gets it. On SQLite
every transaction takes the write lock when it begins: Optuna reads a trial's state and then writes it, between which
another process could otherwise come. Time is the server's, or this machine's for SQLite."""

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

ERRORS = 3  # a trial that raised so often has failed
DEATHS = 50  # and so has one on which so many workers died
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
    """A trial in the hands of one worker. claims: this one and those of workers that died. errors: raised so far."""

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
        sampler: Optuna's, for a search. objectives: how many numbers it looks at, all to be large.
        reading: the sweep must be there, and nothing is written: the database is opened for reading only.
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
        """Note what the sweep is, or check that it is the one in the storage; add the trials that are not there yet.

        Killed in the middle and called again, it goes on; of several at once, one does it.

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
        """The first unfinished trial that nobody has, for this worker alone; None if there is none now."""
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
        """The trial as it is now that it is ours, and set running; None if it was finished meanwhile."""
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
        """Renew the lease and note the steps done; False if it is another's by now."""
        with self.engine.begin() as connection:
            values = {"until": _now(connection) + self.lease, "done": done}
            return connection.execute(_mine(claim).values(**values)).rowcount == 1

    def finish(self, claim: Claim, rows: Sequence[Mapping[str, Any]], values: Sequence[float], done: int) -> bool:
        """Put a trial's rows in and finish it; False if the lease was lost or another had finished it."""
        if not self.beat(claim, done):
            return False
        try:
            plain = plain_json([dict(row) for row in rows])
            setting = self.storage.get_trial(claim.trial_id).user_attrs.get("setting")
            self.storage.set_trial_user_attr(claim.trial_id, "rows", plain)
            self.storage.set_trial_user_attr(claim.trial_id, "sha256", seal_of(claim.number, setting, plain))
            kept = self.storage.get_trial(claim.trial_id).user_attrs  # Optuna says nothing where the tables refuse it
            if kept.get("rows") != plain or "sha256" not in kept:
                raise self._refused(claim, "to keep the rows of")
            self._end(claim, TrialState.COMPLETE, values)
        except SweepStopped:
            raise
        except RuntimeError:  # as Optuna says of a trial that is finished
            self.close(claim)
            return False
        self.close(claim)  # only now: an unfinished trial that is closed would be nobody's
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
        """Keep a fact with the trial."""
        self.storage.set_trial_user_attr(claim.trial_id, name, value)

    def fail(self, claim: Claim, why: str) -> None:
        """Give a trial up for good; nothing if it is another's by now."""
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
        """The trial is finished: nobody is to claim it again."""
        with self.engine.begin() as connection:
            connection.execute(_mine(claim).values(until=NEVER))

    def release(self, claim: Claim, *, error: bool = False, pause: float = 0.0) -> None:
        """Leave an unfinished trial to the next worker, after a pause; error: because it raised one."""
        columns = _LEASES.c
        with self.engine.begin() as connection:
            values = {"until": _now(connection) + pause - 1e-3, "claims": columns.claims - 1}
            connection.execute(_mine(claim).values(errors=columns.errors + int(error), **values))

    def expire(self, owner: str) -> None:
        """Let go of what a worker held that is known to be dead."""
        with self.engine.begin() as connection:
            whose = sql.update(_LEASES).where(_LEASES.c.owner == owner, _LEASES.c.until < NEVER / 2)
            connection.execute(whose.values(until=0.0))

    def take_away(self, lease: Any) -> bool:
        """Ends a lease, if it is still as it was found."""
        columns = _LEASES.c
        same = (columns.trial_id == lease.trial_id, columns.owner == lease.owner, columns.until == lease.until)
        with self.engine.begin() as connection:
            return connection.execute(sql.update(_LEASES).where(*same).values(until=0.0)).rowcount == 1

    # --- looking -------------------------------------------------------------------------

    def trials(self) -> list[FrozenTrial]:
        """All trials as they are now, by number."""
        found: list[FrozenTrial] = self.study.get_trials(deepcopy=False)
        return found

    def leases(self) -> dict[int, Any]:
        """The leases of this sweep's trials and others', by trial."""
        with self.engine.begin() as connection:
            return {row.trial_id: row for row in connection.execute(sql.select(_LEASES))}

    def now(self) -> float:
        """Seconds since 1970, by the clock that leases go by."""
        with self.engine.begin() as connection:
            return _now(connection)

    def dispose(self) -> None:
        """Close the connections, whether the database answers or not."""
        with suppress(Exception):
            self.storage.scoped_session.remove()
        with suppress(Exception):
            self.engine.dispose()


def seal_of(number: int, setting: Any, rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the digest that is stored with a finished trial: databases do not see a flipped bit by themselves."""
    return json_digest([number, setting, [dict(row) for row in rows]])


def _mine(claim: Claim) -> Any:
    return sql.update(_LEASES).where(_LEASES.c.trial_id == claim.trial_id, _LEASES.c.owner == claim.owner)


def _now(connection: Any) -> float:
    if connection.dialect.name == "sqlite":
        return time.time()
    return float(connection.execute(sql.text("SELECT extract(epoch FROM clock_timestamp())")).scalar())
