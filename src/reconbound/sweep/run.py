"""A sweep: many settings of a training on one data set, with any number of workers on any number of machines."""

from __future__ import annotations

import os
import secrets
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy as sql

from reconbound._internal import files
from reconbound._internal.checks import DataError, InputError, choice, number, warn_user, whole
from reconbound._internal.rng import GUESSABLE, checked_seed, new_seed, seed_warning
from reconbound.report.folder import prepare
from reconbound.report.formats import paragraphs
from reconbound.sweep import space as spaces
from reconbound.sweep.database import AGAIN, SweepStopped, describe_fault, first_line, retry_database, shown_url
from reconbound.sweep.frontier import FLOORS, checked_floor, rows_of, score_of, sealed_rows, write_table
from reconbound.sweep.queue import Claim, Queue, without_experimental_warnings
from reconbound.sweep.space import Choices, Row, Setting, Space
from reconbound.sweep.trial import TRIALS
from reconbound.sweep.workers import Job, owner_name, progress, supervise, work
from reconbound.validate.model import ReconboundWarning

DATABASE, SEED, ABOUT = "sweep.db", "seed", "sweep.json"


@dataclass(frozen=True)
class Sweep:
    """The options of a sweep.

    Attributes:
        data: name or path of the data set, as in `reconbound.load_dataset`.
        load: options of `reconbound.load_dataset`.
        out: the sweep's folder; confidential (mode 0700).
        space: settings to search, by name: lists of values, Choices, or (for "tpe") Ranges.
        steps: step counts; every training goes to the largest and is measured at the others on the way.
        runs: the number of runs for each setting.
        search: "grid" for every combination, "tpe" for Optuna's tree-structured Parzen estimator.
        trials: the number of trials of a "tpe" search.
        floor: the floor of a "tpe" search.
        at_least: a "tpe" search maximises the accuracy with the floor at least this high; without it, both the accuracy
            and the floor at the largest step count.
        plan: options of the training that stay the same, as in `AuditOptions.with_changes`.
        delta: the δ at which ε is reported.
        storage: URL of a SQLite file or a PostgreSQL database; sweep.db in the folder when None.
        name: the name of the study.
        seed: the seed of the sweep; when None, that in the folder's file "seed", created if missing. It is as secret as
            the data.
        grace: seconds after which a worker without a heartbeat is taken for dead; the same for all workers.
        together: the number of settings that are trained at once on one device, as a fleet; one by one when None.
    """

    data: str
    out: Path
    space: Space
    steps: tuple[int, ...]
    runs: int = 1
    search: str = "grid"
    trials: int | None = None
    floor: str | None = None
    at_least: float | None = None
    load: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    delta: float = 1e-5
    storage: str | None = None
    name: str = "sweep"
    seed: int | None = field(default=None, repr=False)
    grace: int = 60
    together: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", Path(self.out))
        object.__setattr__(self, "space", spaces.checked_space(self.space))
        object.__setattr__(self, "steps", spaces.checked_steps(self.steps))
        whole("runs", self.runs)
        whole("grace", self.grace)
        choice("search", self.search, ("grid", "tpe"))
        number("delta", self.delta, above=0.0, below=1.0)
        optional: dict[str, Callable[[str, Any], Any]] = {"together": whole, "trials": whole}
        optional |= {"floor": partial(choice, options=FLOORS), "at_least": partial(number, above=0.0)}
        for name, check in optional.items():
            if getattr(self, name) is not None:
                check(name, getattr(self, name))
        if self.seed is not None:
            checked_seed(self.seed)
        if self.search == "grid":
            spaces.settings_of(self.space)
            for name in ("trials", "at_least"):
                if getattr(self, name) is not None:
                    raise InputError(name, "must be left out of a grid: it is for --search tpe", getattr(self, name))
        elif self.trials is None:
            raise InputError("trials", "must be given for a search", None)

    @property
    def url(self) -> str:
        """Returns the URL of the storage."""
        return self.storage or f"sqlite:///{(self.out / DATABASE).absolute()}"


def sweep(
    config: Sweep, *, workers: int = 1, show: bool = True, make_train: Callable[[Sweep], Any] | None = None
) -> list[Row]:
    """Runs a sweep to its end, or continues it. Others may work on the same storage at the same time.

    Args:
        config: the sweep.
        workers: processes on this machine; one that dies is replaced, and its trial continues where it was (settings
            trained together begin again).
        show: whether to show the plan and progress on standard error, as a bar on a terminal and as plain lines
            elsewhere.
        make_train: creates the training, for tests; a function at the top of a module.

    Returns:
        All rows of the sweep.

    Guarantee: every setting is finished exactly once, whichever workers die when; its rows are a function of the data,
    the sweep's seed, the plan and the setting, whoever trains it and however often it was interrupted.
    """
    whole("workers", workers)
    _refuse_another(config)
    if config.seed is not None and config.seed < GUESSABLE:
        warn_user(seed_warning("seed"), ReconboundWarning)
    train = (make_train or make_trainer)(config)  # before the folder is created: it refuses most mistakes
    for folder in (config.out, config.out / TRIALS):
        prepare(folder)
    queue = open_queue(config)
    try:
        retry_database(partial(begin, queue, config, train))
        if show:
            caveats = files.unsealed_json(config.out / ABOUT).get("caveats") or {}
            lines = [*plan_lines(queue, config, train, workers), *(f"Note: {caveat}" for caveat in caveats.values())]
            print("\n".join(lines), file=sys.stderr, flush=True)
        with progress(queue, train.steps, show):
            if workers == 1:
                work(queue, _make_job(queue, config, train), owner_name())
            else:
                supervise(queue, workers, partial(_join, config, make_train))
        return rows_of(retry_database(queue.slots))
    except Exception as reason:
        fault = None if isinstance(reason, SweepStopped) else describe_fault(reason)
        if fault is None:
            raise
        raise SweepStopped(f"{fault}. {AGAIN}") from reason
    finally:
        queue.dispose()


def stored(folder: Path, storage: str | None = None) -> tuple[list[Row], dict[str, Any]]:
    """Returns the rows of a sweep's finished trials, and how far it is, from its storage.

    Args:
        folder: the sweep's.
        storage: its URL, where that is not the folder's own database.
    """
    about = read_about(folder)
    if about["storage"] is not None and storage is None:  # a folder may come from anyone: it must not name a server
        what = "must be given as to reconbound sweep (with its password): the sweep is not in its folder, and its own"
        raise InputError("storage", f"{what} word for where it is is not trusted", about["storage"])
    if storage is None and not (folder / DATABASE).exists():
        raise DataError(f"{folder / DATABASE} does not exist: it held what the sweep found")
    try:
        queue = Queue(storage or f"sqlite:///{(folder / DATABASE).absolute()}", about["name"], reading=True)
        try:
            slots = queue.slots()
            rows = rows_of(slots)
        finally:
            queue.dispose()
    except (sql.exc.SQLAlchemyError, optuna.exceptions.OptunaError, LookupError, TypeError) as reason:
        where = shown_url(storage) if storage else folder / DATABASE
        raise DataError(f"{where} cannot be read, or is damaged ({first_line(reason)})") from None
    failures = [slot.failure for slot in slots if slot.failure is not None]
    finished = sum(slot.complete is not None for slot in slots)
    facts = {name: about.get(name) for name in ("data", "runs", "task", "caveats", "inferred_ranges")}
    facts |= {"folder": str(folder), "guesses": about.get("guesses") or {}, "trials": len(slots)}
    return rows, {**facts, "finished": finished, "failed": len(failures), "error": next(iter(failures), None)}


def read_about(folder: Path) -> dict[str, Any]:
    """Returns the facts of a sweep from its folder. Raises a DataError where it holds none, or one that was changed.

    A folder with links, pipes or devices is refused first, whatever else it holds.
    """
    files.refuse_special_files(folder, TRIALS)
    if (folder / TRIALS).is_dir():
        files.refuse_special_files(folder / TRIALS, *os.listdir(folder / TRIALS))
    try:
        about = files.unsealed_json(folder / ABOUT)
    except OSError:
        why = "does not exist" if not folder.exists() else f"holds no sweep ({ABOUT} cannot be read)"
        raise DataError(f"{folder} {why}: make one by reconbound sweep DATA --grid ... --out {folder}") from None
    except files.Unreadable as reason:
        raise DataError(f"{reason}: the command that made the sweep writes it again") from None
    kinds: dict[str, Any] = {"name": str, "data": str, "runs": int}
    kinds |= {"storage": str | None, "guesses": dict | None, "caveats": dict | None}
    wrong = [name for name, kind in kinds.items() if not isinstance(about.get(name), kind)]
    if wrong:
        raise DataError(f"{folder / ABOUT} is not a file of reconbound's ({wrong[0]} is missing, or something else)")
    found: dict[str, Any] = files.printable(about)
    return found


def publish(folder: Path, storage: str | None = None) -> dict[str, Any]:
    """Writes the table and the pages of a sweep as far as it is. Returns their paths, and how far it is.

    Args:
        folder: the sweep's.
        storage: its URL, where that is not the folder's own database.
    """
    from reconbound.sweep.page import write_pages

    rows, facts = stored(folder, storage)
    pages: dict[str, str | None] = {"table": None, "page": None}
    if rows:
        pages = {"table": str(write_table(folder, rows)), "page": str(write_pages(folder, rows, facts))}
    return {"confidential": True, **facts, **pages}


def make_trainer(config: Sweep) -> Any:
    """Creates the training of the sweep's settings."""
    from reconbound.accounting.spec import RULES as EVERY
    from reconbound.auditing.options import RULES, default_options
    from reconbound.data import load_dataset
    from reconbound.sweep.together import TogetherTrainer
    from reconbound.sweep.trial import Trainer

    dataset = load_dataset(config.data, **config.load)
    plan = default_options(dataset, worlds=False, **config.plan)
    if len(dataset.scale) == 0:
        why = "must have a private column of numbers: settings are compared by the floors on their errors"
        raise InputError("data", why, config.data)
    named = config.space.get("sampler")
    samplers = named.values if isinstance(named, Choices) else (plan.settings.sampler,)
    rules = dict.fromkeys(rule for sampler in samplers for rule in RULES[sampler])
    asked = (config.floor or "").partition("_")[0]
    if asked in EVERY and asked not in rules:  # no row would have it
        what = f"must be of the batches that are drawn ({', '.join(rules)}), or of the mechanism"
        raise InputError("floor", what, config.floor)
    kind = Trainer if config.together is None else TogetherTrainer
    if kind is TogetherTrainer:
        TogetherTrainer.check(plan)  # before a seed is created for nothing
    return kind(dataset, plan, config.steps, config.runs, sweep_seed(config), config.delta)


def open_queue(config: Sweep) -> Queue:
    """Opens the sweep's storage."""
    with without_experimental_warnings():
        sampler = optuna.samplers.TPESampler(n_startup_trials=max(5, (config.trials or 0) // 5), constant_liar=True)
    objectives = 2 if config.at_least is None else 1
    return Queue(config.url, config.name, grace=config.grace, sampler=sampler, objectives=objectives)


def _refuse_another(config: Sweep) -> None:
    """Refuses a folder with links or pipes, or that holds another sweep.

    Two sweeps would share their secret seed, and overwrite their ledgers.
    """
    try:
        about = read_about(config.out)
    except DataError:  # none, or one that cannot be read any more
        return
    where = None if config.storage is None else shown_url(config.storage)
    if (about["name"], about["storage"]) != (config.name, where):
        whose = f"the sweep {about['name']!r} in {about['storage'] or DATABASE}"
        raise InputError("out", f"must be another folder: it holds {whose}", str(config.out))


def begin(queue: Queue, config: Sweep, train: Any) -> None:
    """Enqueues the sweep's settings, and writes their location into the folder.

    Args:
        queue: the sweep's queue.
        config: the sweep.
        train: its training.
    """
    known: dict[str, Any] = {}  # of the data and the models, for the pages
    if hasattr(train, "guesses"):
        named = config.space.get("model")
        models = tuple(named.values) if isinstance(named, Choices) else ()
        known = {"guesses": train.guesses(), "task": train.dataset.task}
        known["caveats"] = train.caveats(models)  # refuses a model that cannot be trained before its trials are made
        known["inferred_ranges"] = train.dataset.inferred_ranges
    facts, space = {**train.facts(), "search": config.search}, spaces.describe_space(config.space)
    if config.search == "tpe":
        facts |= {"grid": space, "floor": config.floor, "at_least": config.at_least}
        queue.begin(facts, [], config.trials or 0)
    else:
        queue.begin(facts, spaces.settings_of(config.space))
    about: dict[str, Any] = {"name": config.name, "storage": config.storage and queue.shown, "data": config.data}
    about |= {"grid": space, "steps": config.steps, "runs": config.runs}
    content = files.sealed_json({"confidential": True, **about, **known})
    files.remove_leftovers(config.out, older_than=config.grace)
    files.write_whole(config.out / ABOUT, content, mode=files.CONFIDENTIAL)


def plan_lines(queue: Queue, config: Sweep, train: Any, workers: int) -> list[str]:
    """Describes what the sweep will do: trainings, settings, workers, the place, and what is done already.

    Args:
        queue: the sweep's queue.
        config: the sweep.
        train: its training.
        workers: the number of workers.
    """
    lists = spaces.describe_space(config.space).items()
    grid = [f"{name} {', '.join(map(spaces.format_value, v)) if isinstance(v, list) else v}" for name, v in lists]
    slots = queue.slots()
    trained, at = sum(slot.complete is not None for slot in slots), [f"{steps:,}" for steps in config.steps]
    data = [train.dataset.summary()] if hasattr(train, "dataset") else []
    context = {"config": config, "workers": workers, "slots": slots, "trained": trained, "grid": grid, "at": at}
    return [*data, *paragraphs("sweep-plan.txt", **context)]


def choose_setting(queue: Queue, config: Sweep, claim: Claim) -> Claim:
    """Returns a claim with its setting. In a search Optuna's sampler chooses it, unless an earlier attempt had one.

    Args:
        queue: the sweep's queue.
        config: the sweep.
        claim: the trial.
    """
    if config.search == "grid":
        return claim
    trial = optuna.trial.Trial(queue.study, claim.trial_id)
    setting: Setting = {}
    for name, values in config.space.items():
        if isinstance(values, Choices):
            setting[name] = trial.suggest_categorical(name, values.values)
        else:
            setting[name] = trial.suggest_float(name, values.low, values.high, log=values.log)
    queue.set_fact(claim, "setting", setting)
    return replace(claim, setting=setting)


def values_of(config: Sweep, rows: Sequence[Row]) -> list[float]:
    """Returns the numbers that a search maximises.

    They are accuracy and floor at the largest step count, or the best accuracy with a floor.

    Args:
        config: the sweep.
        rows: of one trial.
    """
    floor = config.floor or checked_floor(rows)
    if config.at_least is not None:
        return [score_of(rows, floor, config.at_least)]
    last = rows[-1]
    return [float(last["accuracy"] or 0.0), spaces.log10(float(last.get(floor) or 0.0))]


def sweep_seed(config: Sweep) -> int:
    """Returns the sweep's seed: as given, or as the folder has it; created and stored there the first time."""
    prepare(config.out)
    path = config.out / SEED
    wanted = new_seed() if config.seed is None else config.seed
    with suppress(FileExistsError):
        beside = config.out / f".{SEED}.{secrets.token_hex(4)}"
        files.write_whole(beside, f"{wanted}\n".encode(), mode=files.CONFIDENTIAL)
        try:
            os.link(beside, path)  # of several processes, one creates it
        finally:
            beside.unlink()
    try:
        found = checked_seed(int(path.read_text()))
    except (OSError, ValueError):
        raise InputError("out", f"must have the sweep's seed in {SEED}", str(path)) from None
    if config.seed is not None and config.seed != found:
        raise InputError("seed", f"must stay the one in {path}", "another")
    return found


def _join(config: Sweep, make_train: Callable[[Sweep], Any] | None, owner: str, stop: Callable[[], bool]) -> int:
    """Works on the sweep from its own process, without repeating warnings about the data and the model."""
    from reconbound.validate import KinkWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        train = (make_train or make_trainer)(config)
    queue = retry_database(partial(open_queue, config))  # the sweep is under way: a storage out of reach is waited for
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KinkWarning)
        return work(queue, _make_job(queue, config, train), owner, stop)


def _make_job(queue: Queue, config: Sweep, train: Any) -> Job:
    """Builds the work of a worker. Settings that a search chooses again are not trained again."""

    def train_new(settings: Sequence[Setting], folders: Sequence[Path], report: Any) -> list[Any]:
        found: dict[int, Any] = {}
        if config.search == "tpe":
            trained = {spaces.key(slot.setting or {}): slot for slot in queue.slots() if slot.complete is not None}
            keys = [spaces.key(setting) for setting in settings]
            found = {k: sealed_rows(trained[name]) for k, name in enumerate(keys) if name in trained}
        new = [k for k in range(len(settings)) if k not in found]
        if new and config.together is None:
            found[0] = train(settings[0], folders[0], partial(report, [0]))
        elif new:
            own = [settings[k] for k in new], [folders[k] for k in new]
            rows = train.train_all(*own, lambda which, done: report([new[k] for k in which], done))
            found |= dict(zip(new, rows, strict=True))
        return [found[k] for k in range(len(settings))]

    choose, values = partial(choose_setting, queue, config), partial(values_of, config)
    return Job(choose, train_new, values, config.out, config.together or 1)
