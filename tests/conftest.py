"""One thread for every library, before NumPy or torch is loaded; hypothesis without deadlines; commands to call."""

import contextlib
import gc
import itertools
import json
import os
import shutil
import sys
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ[variable] = "1"

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile("reconbound", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("reconbound")


FROZEN = [0]  # how many modules were imported when the garbage collector last lost sight of them
gc.disable()  # while tests are collected: it would look through all that is imported again and again


def pytest_collection_finish():
    """Takes all that is imported by now out of the garbage collector's sight: collecting it again takes a second."""
    gc.enable()
    gc.collect()
    gc.freeze()
    FROZEN[:] = [len(sys.modules)]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """The same after tests that imported much: a fleet of trainings collects garbage by itself when it ends."""
    if len(sys.modules) > FROZEN[0] + 300 and nextitem is not None and nextitem.path != item.path:
        pytest_collection_finish()


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk():
    """os.fsync only looks at its file: no test cuts the power, and an audit waits 50 times. FSYNC=1 waits.

    That it is called, and what happens when it fails, is tested by tests that put their own in its place."""
    own = os.fsync
    if os.environ.get("FSYNC") != "1":
        os.fsync = os.fstat
    yield
    os.fsync = own


@pytest.fixture(scope="session", autouse=True)
def _one_look_at_optunas_migrations():
    """Optuna reads the newest version of its tables from all its migrations whenever a sweep is opened: 40 ms."""
    if "optuna" not in sys.modules:  # a test file that needs none
        yield
        return
    from optuna.storages._rdb.storage import _VersionManager

    own, known = _VersionManager.get_head_version, []

    def head_version(self):
        known[:] = known or [own(self)]
        return known[0]

    _VersionManager.get_head_version = head_version
    yield
    _VersionManager.get_head_version = own


CHECKED = {}  # what a model's check found, by all that it looks at
#: Folders whose tests make hundreds of small audits of few models, and pages of few mechanisms.
AUDITS = ("auditing", "cli", "data", "docs", "faults", "integrations", "report", "sweep", "training")


@pytest.fixture(scope="module", autouse=True)
def _each_model_is_checked_once(request):
    """Tests of audits, of damaged files and of sweeps start hundreds of small audits: each model is checked once.

    What the check finds, and that audits and sweeps make it, is tested in other folders, and of models of one's own in
    all but two."""
    folder = request.node.path.parent.name
    if folder not in AUDITS:
        yield
        return
    from reconbound.auditing import models

    own = models._caveats

    def caveats(dataset, spec, model, inputs, targets):
        if ":" in spec and folder not in ("faults", "sweep"):  # another test may have another model of that name
            return own(dataset, spec, model, inputs, targets)
        private = None if dataset.private is None else dataset.private.tobytes()
        seen = inputs.tobytes(), targets.tobytes(), private, dataset.scale.tobytes(), dataset.task
        key = spec, repr(model), *seen
        if key not in CHECKED:
            CHECKED[key] = own(dataset, spec, model, inputs, targets)
        return dict(CHECKED[key])

    models._caveats = caveats
    yield
    models._caveats = own


REMEMBERED = []  # pairs: a function that takes long for the floors on a page, and what remembers its results


@pytest.fixture(scope="module", autouse=True)
def _each_floor_is_computed_once(request):
    """Pages and commands of the same mechanism, in tests of what is made of its floors, compute them once.

    The floors themselves, and the search for noise, are tested in other folders."""
    if request.node.path.parent.name not in AUDITS:
        yield
        return
    from cheaper import remember, replaced_everywhere
    from reconbound.bounds.divergence_success import success_from_kl
    from reconbound.mechanisms.base import Mechanism
    from reconbound.mechanisms.calibrate import calibrate, calibrate_epsilon
    from reconbound.mechanisms.calibrate_risk import calibrate_risk
    from reconbound.mechanisms.guarantee import floor_on, guarantee
    from reconbound.report import text

    if not REMEMBERED:
        searched = text._calibrated, text._chances_of_groups, calibrate, calibrate_epsilon, calibrate_risk
        taking = *searched, floor_on, guarantee, success_from_kl, Mechanism.protection
        REMEMBERED[:] = [(one, remember(one)) for one in taking]
    with contextlib.ExitStack() as stack:
        for own, remembered in REMEMBERED:
            stack.enter_context(replaced_everywhere(own, remembered))
        Mechanism.protection = REMEMBERED[-1][1]
        yield
        Mechanism.protection = REMEMBERED[-1][0]


@pytest.fixture(scope="module", autouse=True)
def _small_pages(request):
    """Pages have a line in place of plotly's script of 4.7 MB, except in a browser, in test_report and for the docs.

    Where audits and sweeps are tested, pages advise on one floor, not on four: the search for each noise takes long."""
    folder, in_browser = request.node.path.parent.name, any(m.name == "browser" for m in request.node.iter_markers())
    whole = in_browser or folder == "docs" or request.node.path.stem == "test_report"
    pages = folder in AUDITS or "reconbound.report.pages" in sys.modules  # tests of bounds alone load no torch
    with contextlib.ExitStack() as stack:
        if pages and not whole:
            from cheaper import short_script

            stack.enter_context(short_script())
        if folder in ("auditing", "data", "faults", "integrations", "sweep", "training"):
            from cheaper import one_target

            stack.enter_context(one_target())
        yield


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command line in this process: status, standard output, standard error."""
    from reconbound.cli import app as cli

    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments):
        status = cli.run([str(a) for a in arguments])
        return status, *capsys.readouterr()

    return call


@pytest.fixture(autouse=True)
def same_probes(monkeypatch):
    """Probes that nobody gave a generator for are the same in every run of a test: its figures do not change."""
    seeds = itertools.count(1)
    monkeypatch.setattr("reconbound._internal.rng._entropy", lambda: next(seeds))


@pytest.fixture
def same_noise(monkeypatch):
    """Learners whose noise and batches depend on the seed, run and step alone, to compare runs of other settings."""
    from learning import SameNoise
    from reconbound.training.private_sgd import PrivateSGD

    for name in ("_begin_run", "_noise"):
        monkeypatch.setattr(PrivateSGD, name, getattr(SameNoise, name))


@pytest.fixture
def answer(run):
    """The JSON of a command that must succeed."""

    def call(*arguments):
        status, out, err = run(*arguments, "--json")
        assert (status, err) == (0, "")
        return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))

    return call


@pytest.fixture(scope="session")
def copy_of(tmp_path_factory):
    """Returns a function that copies the folder of this name, which is built once in each process."""
    built = {}

    def copy(name, build):
        if name not in built:
            built[name] = tmp_path_factory.mktemp("built") / name
            build(built[name])
        return shutil.copytree(built[name], tmp_path_factory.mktemp("runs") / name)

    return copy


@pytest.fixture(scope="module")
def digits(copy_of):
    """The folder of a short training on digits."""
    from run_folders import digits_folder

    return copy_of("digits", lambda folder: digits_folder(folder, runs=5, steps=20, records=200, noise=0.1))


@pytest.fixture(scope="module")
def people(copy_of):
    """The folder of a short training on a table."""
    from run_folders import people_folder

    return copy_of("people", lambda folder: people_folder(folder, steps=20, records=200, noise=0.1))


@pytest.fixture(scope="module")
def audited(copy_of):
    """The folder of a finished audit of a small table, by the library: auditing.people with three runs."""
    import auditing
    from reconbound.auditing.run import run_audit

    return copy_of(
        "audit-people", lambda folder: run_audit(auditing.people(), auditing.options(runs=3), folder, show=False)
    )


@pytest.fixture(scope="module")
def table_audit(tmp_path_factory):
    """The folder of a finished audit of a small CSV file, by the command."""
    from calling import QUICK, write_people
    from reconbound.cli import app as cli

    root = tmp_path_factory.mktemp("cli")
    table = write_people(root / "people.csv")
    options = ["--range", "age=0:120", "--unit", "age=years", "--target", "<b>pay</b>", "--private", "age,hours"]
    assert cli.run(["audit", str(table), *options, *QUICK, "--out", str(root / "out"), "--quiet"]) == 0
    return root / "out"


@pytest.fixture(scope="module")
def digits_audit(tmp_path_factory):
    """The folder of a finished audit of a few digits, by the command."""
    from calling import QUICK
    from reconbound.cli import app as cli

    out = tmp_path_factory.mktemp("digits") / "out"
    assert cli.run(["audit", "--limit", "60", *QUICK, "--out", str(out), "--quiet"]) == 0
    return out


@pytest.fixture(scope="session", autouse=True)
def _one_fork_server():
    """Whoever starts this process's fork server, a test or a sweep: it loads helpers/preloaded.py.

    What it has not loaded each of some hundred processes would load for itself, for seconds. The server loads before it
    knows this process's path (a bug of Python's until 3.12.8), so it gets that in its environment."""
    from multiprocessing import forkserver

    server, own = forkserver._forkserver, forkserver.ensure_running

    def ensure_running():
        if server._forkserver_pid is not None:
            own()
            return
        before = os.environ.get("PYTHONPATH")
        paths = [str(Path(__file__).parent / "helpers"), before or ""]
        os.environ["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
        server.set_forkserver_preload(["preloaded"])
        try:
            own()
        finally:
            os.environ.pop("PYTHONPATH")
            if before is not None:
                os.environ["PYTHONPATH"] = before

    server.ensure_running = forkserver.ensure_running = ensure_running
    yield
    del server.ensure_running
    forkserver.ensure_running = own


@pytest.fixture(scope="module")
def browser():
    """Chromium, for files marked by browsing.pytestmark."""
    from browsing import chromium

    with chromium() as started:
        yield started


@pytest.fixture
def mine(tmp_path, monkeypatch, request):
    """A module called mine in the working folder, with the factories that the tests' own module has as FACTORIES."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(request.module.FACTORIES)
    yield
    sys.modules.pop("mine", None)
