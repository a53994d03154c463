"""Schedules from files, and what Opacus recorded: the same however they are given, and nothing in a file is run."""

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import GaussianAccountant, PRVAccountant, RDPAccountant
from opacus.schedulers import ExponentialNoise
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from reconbound._internal.checks import InputError
from reconbound.mechanisms import (
    Composition,
    SampledGaussian,
    from_opacus,
    read_opacus_state,
    read_schedule,
    schedule,
)

ADD = "add/remove"
STRETCH = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 5}


def test_a_schedule_from_a_file(tmp_path):
    stretches = [
        {"noise_multiplier": 1.5, "sample_rate": 0.01, "steps": 100},
        {"noise_std": 3.0, "max_grad_norm": 1.5, "sample_rate": 0.02, "epochs": 3, "clip": "smooth"},
        {"noise_std": [2.0, 2.0], "max_grad_norm": [1.0, 1.0], "sample_rate": 0.01, "steps": 7},
        {"noise_multiplier": 4.0, "sample_rate": 0.3, "steps": 10, "sampler": "shuffle"},
        {"noise_multiplier": 4.0, "sample_rate": 0.3, "epochs": 2.5, "sampler": "shuffle"},
    ]
    (tmp_path / "schedule.json").write_text(json.dumps({"clip": "hard", "stretches": stretches}))
    found = read_schedule(tmp_path / "schedule.json")
    assert isinstance(found, Composition)
    assert found.mechanisms[0] == SampledGaussian(1.5, 0.01, 100, clip="hard")
    assert found.mechanisms[1] == SampledGaussian(2.0, 0.02, 150, clip="smooth")
    assert found.mechanisms[2].noise_multiplier == pytest.approx(2**0.5)
    assert found.mechanisms[3] == SampledGaussian(4.0, 1.0, 4, clip="hard", sampler="shuffle")  # 3 batches an epoch
    assert found.mechanisms[4] == SampledGaussian(4.0, 1.0, 3, clip="hard", sampler="shuffle")
    assert schedule([STRETCH]) == SampledGaussian(1.0, 0.01, 5)


@pytest.mark.parametrize(
    ("stretches", "says"),
    [
        ([], "one stretch or more"),
        ({"stretches": []}, "one stretch or more"),
        ("a", "one stretch or more"),
        ({"stretches": [STRETCH], "noise": 1}, "no keys but"),
        ([1.0], "stretch 1: it must be a dictionary"),
        ([STRETCH, {**STRETCH, "noise": 1.0}], "stretch 2: it must have no keys but"),
        ([{**STRETCH, "noise_std": 1.0}], "must not be given twice"),
        ([{"noise_std": 1.0, "sample_rate": 0.1, "steps": 1}], "must be given: noise_multiplier, or noise_std and"),
        ([{**STRETCH, "epochs": 1}], "steps must be given, or epochs, and not both"),
        ([{"noise_multiplier": 1.0, "sample_rate": 0.01}], "steps must be given"),
        ([{"noise_multiplier": 1.0, "steps": 1}], "sample_rate must be a number"),
        ([{**STRETCH, "sample_rate": 1.5}], "sample_rate must be at most 1"),
        ([{**STRETCH, "noise_multiplier": 0.0}], "noise_multiplier must be greater than 0"),
        ([{**STRETCH, "noise_multiplier": float("nan")}], "noise_multiplier must be a finite number"),
        ([{**STRETCH, "steps": 1.5}], "steps must be a whole number"),
        ([{**STRETCH, "sampler": "x"}], "sampler must be one of"),
        ([{**STRETCH, "clip": "x"}], "clip must be one of"),
        ([{"noise_std": [1.0], "max_grad_norm": [1.0, 2.0], "sample_rate": 0.1, "steps": 1}], "max_grad_norms must be"),
        ([{"noise_std": 1.0, "max_grad_norm": 0.0, "sample_rate": 0.1, "steps": 1}], "max_grad_norm must be greater"),
    ],
)
def test_wrong_schedules_are_named(stretches, says):
    with pytest.raises(InputError) as caught:
        schedule(stretches)
    assert caught.value.name == "schedule"
    assert says in str(caught.value)


def test_files_that_are_not_json(tmp_path):
    for content in (b"", b"{", b"[" * 10**5, b"\xff\xfe", b'{"stretches": 1'):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(InputError, match="schedule must"):
            read_schedule(tmp_path / "bad.json")
        with pytest.raises(InputError, match="opacus_state must"):
            read_opacus_state(tmp_path / "bad.json")


def trained(accountant="prv", gamma=0.5, **options):
    """Returns an engine after two short epochs whose noise falls in between, and model and optimiser."""
    torch.manual_seed(0)
    engine = PrivacyEngine(accountant=accountant)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,))), batch_size=8)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=2.0, **options
    )
    scheduler = ExponentialNoise(optimizer, gamma=gamma)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        scheduler.step()
    return engine, model, optimizer


@pytest.mark.filterwarnings("ignore")
def test_an_engine_its_state_and_its_files_are_the_same(tmp_path):
    engine, model, optimizer = trained(max_grad_norm=1.0)
    expected = Composition((SampledGaussian(2.0, 0.2, 5, clip="hard"), SampledGaussian(1.0, 0.2, 5, clip="hard")))
    state = engine.accountant.state_dict()
    checkpoint = tmp_path / "checkpoint.pt"
    engine.save_checkpoint(path=checkpoint, module=model, optimizer=optimizer)
    torch.save(state, tmp_path / "state.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "state.json").write_text(json.dumps(state))
    (tmp_path / "history.json").write_text(json.dumps(engine.accountant.history))
    for found in (
        from_opacus(engine),
        from_opacus(engine.accountant),
        from_opacus(state),
        from_opacus(torch.load(checkpoint, weights_only=True)),
        *(
            read_opacus_state(tmp_path / name)
            for name in ("checkpoint.pt", "state.pt", "old.pt", "state.json", "history.json")
        ),
    ):
        assert found == expected
    assert read_opacus_state(checkpoint, sampler="shuffle").mechanisms[0].steps == 1  # an epoch of five batches
    assert from_opacus(engine, sampler="fixed").mechanisms[1].sampler == "fixed"
    ours, theirs = expected.epsilon_at(1e-5, ADD), engine.get_epsilon(1e-5)  # PRV: an upper bound, up to 0.01 above
    assert ours <= theirs <= ours + 0.02


@pytest.mark.filterwarnings("ignore")
def test_clipping_by_layer_has_the_noise_multiplier_of_the_record():
    engine, _, optimizer = trained(gamma=1.0, max_grad_norm=[1.0, 0.5], clipping="per_layer")
    assert from_opacus(engine) == SampledGaussian(2.0, 0.2, 10, clip="hard")
    noise = optimizer.noise_multiplier * optimizer.max_grad_norm  # on each layer's sum
    found = SampledGaussian.per_layer([noise, noise], optimizer.max_grad_norms)
    assert found.noise_multiplier == pytest.approx(2.0, rel=1e-6)


@pytest.mark.filterwarnings("ignore:GDP accounting is experimental")
@pytest.mark.parametrize("kind", [RDPAccountant, GaussianAccountant, PRVAccountant])
def test_all_accountants_have_the_same_record(kind):
    accountant = kind()
    for _ in range(3):
        accountant.step(noise_multiplier=1.1, sample_rate=0.05)
    assert from_opacus(accountant) == SampledGaussian(1.1, 0.05, 3, clip="hard")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (RDPAccountant(), "nothing was trained"),
        ([], "nothing was trained"),
        ({}, "must be a PrivacyEngine"),
        (1.0, "must be a PrivacyEngine"),
        ("prv", "must be a PrivacyEngine"),
        ([(1.0, 0.01)], "must be a list of"),
        ([1.0, 0.01, 5], "must be a list of"),
        ([(1.0, 0.01, 5), (0.0, 0.01, 5)], "stretch 2: noise_multiplier must be greater than 0"),
        ([(1.0, 2.0, 5)], "sample_rate must be at most 1"),
        ([(1.0, 0.5, 0)], "steps must be at least 1"),
    ],
)
def test_other_records_are_refused(given, says):
    with pytest.raises(InputError) as caught:
        from_opacus(given)
    assert says in str(caught.value)


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil-was-here",)


@pytest.mark.parametrize("form", ["zip", "old", "pickle"])
def test_nothing_in_a_file_is_run(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    content = {"history": [(1.0, 0.01, 5)], "mechanism": Evil()}
    if form == "pickle":
        (tmp_path / "state.pt").write_bytes(pickle.dumps(content))
    else:
        torch.save(content, tmp_path / "state.pt", _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(InputError, match="nothing in it but tensors"):
        read_opacus_state("state.pt")
    assert not (tmp_path / "evil-was-here").exists()
    torch.load(tmp_path / "state.pt", weights_only=False) if form != "pickle" else pickle.loads(
        (tmp_path / "state.pt").read_bytes()
    )
    assert (tmp_path / "evil-was-here").exists()  # the file would have run something


def test_json_needs_no_torch(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps([[1.0, 0.01, 10**6], [2.0, 0.02, 5]]))
    (tmp_path / "schedule.json").write_text(json.dumps([STRETCH, {**STRETCH, "noise_multiplier": 2.0}]))
    code = (
        "import sys\nfrom reconbound.mechanisms import read_opacus_state, read_schedule\n"
        "from reconbound.mechanisms.guarantee import guarantee\n"
        "guarantee(read_opacus_state('state.json')); guarantee(read_schedule('schedule.json'))\n"
        "assert not {'torch', 'opacus'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
