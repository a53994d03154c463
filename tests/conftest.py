"""One thread for every library, before NumPy or torch is loaded; hypothesis without deadlines; commands to call."""

import json
import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ[variable] = "1"

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile("reconbound", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("reconbound")


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command line in this process: status, standard output, standard error."""
    from reconbound import cli

    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments):
        status = cli.run([str(a) for a in arguments])
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def answer(run):
    """The JSON of a command that must succeed."""

    def call(*arguments):
        status, out, err = run(*arguments, "--json")
        assert (status, err) == (0, "")
        return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))

    return call


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The folder of a short training on digits."""
    from run_folders import digits_folder

    return digits_folder(tmp_path_factory.mktemp("runs") / "digits", runs=5, steps=20, records=200, noise=0.1)


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """The folder of a short training on a table."""
    from run_folders import people_folder

    return people_folder(tmp_path_factory.mktemp("runs") / "people", steps=20, records=200, noise=0.1)
