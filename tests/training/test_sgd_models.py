"""Models, inputs and private parts of any kind, and the caveats of their floors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learning import (
    CLASSES,
    FEATURES,
    RECORDS,
    SameNoise,
    data,
    flat,
    learner,
    losses,
    network,
    settings,
)
from reconbound._internal.checks import InputError
from reconbound.accounting.accountant import FisherAccountant
from reconbound.fisher import Private
from reconbound.training.feed import NoLedger
from reconbound.training.private_sgd import PrivateSGD
from reconbound.validate import ReconboundWarning

# --- models and data -------------------------------------------------------------------------


def test_micro_batches_change_memory_not_results() -> None:
    whole, parts = learner(kind=SameNoise).fit(5), learner(kind=SameNoise, micro_batch=2).fit(5)
    torch.testing.assert_close(flat(whole.model), flat(parts.model), rtol=1e-4, atol=1e-6)
    assert whole.accountant is not None
    assert parts.accountant is not None
    torch.testing.assert_close(whole.accountant.trace(), parts.accountant.trace(), rtol=1e-3, atol=1e-6)


class Two(nn.Module):
    """Two inputs, by position or by name; the first through an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(6, 3), nn.Linear(3 + FEATURES, CLASSES)

    def forward(self, token: Tensor, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.words(token), x], dim=1).tanh())


@pytest.mark.parametrize(
    "private", [None, Private("input", "x"), Private("module", "words"), Private("input", "x", torch.tensor([0, 2]))]
)
@pytest.mark.filterwarnings("ignore:floors do not cover all")
def test_named_inputs_with_private_part(private) -> None:
    x, y = data()
    tokens = torch.randint(0, 6, (RECORDS,), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    one = PrivateSGD(Two(), losses, {"token": tokens, "x": x}, y, settings(), private=private, diagonal="all").fit(4)
    assert one.accountant is not None
    features = {None: FEATURES}.get(private) or (
        3 if private.part == "module" else 2 if private.features is not None else FEATURES
    )
    assert one.features == features
    assert one.accountant.feature_floors().value.shape == (RECORDS, features)
    by_feature = (1 / one.accountant.feature_floors().value).sum(1)
    np.testing.assert_allclose(by_feature, one.accountant.trace().numpy(), rtol=1e-4)
    torch.manual_seed(0)
    place = None if private is None else Private("input", 1, private.features) if private.part == "input" else private
    other = PrivateSGD(Two(), losses, (tokens, x), y, settings(), private=place, diagonal="all").fit(4)
    assert torch.equal(flat(one.model), flat(other.model))
    assert other.accountant is not None
    torch.testing.assert_close(one.accountant.trace(), other.accountant.trace())


def test_private_labels() -> None:
    x, y = data()
    soft = nn.functional.one_hot(y, CLASSES).float()
    soft_loss = lambda out, target: -(target * out.log_softmax(1)).sum(1)  # noqa: E731
    one = PrivateSGD(network(), soft_loss, x, soft, settings(), private="target").fit(4)
    assert one.features == CLASSES
    assert one.accountant is not None
    assert float(one.accountant.trace().min()) > 0


def test_frozen_parameters_do_not_change() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    learner(model, momentum=0.5, weight_decay=0.1).fit(4)
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad is None
    bias = model[0].bias.clone()
    learner(model).repeat(2, steps=3)  # fresh parameters for each run, and the pretrained ones as they were
    assert torch.equal(model[0].weight, before)
    assert not torch.equal(model[0].bias, bias)


def test_repeat_needs_initialise_for_custom_parameters() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(FEATURES, CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w

    with pytest.raises(InputError, match="initialise"):
        learner(Own()).repeat(2, steps=2)
    learner(Own(), initialise=lambda m: nn.init.normal_(m.w)).repeat(2, steps=2)


def test_evaluation_does_not_change_the_model() -> None:
    seen: list[int] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        seen.append(one.step)
        model.eval()
        return {"loss": torch.tensor(1.5)}  # type: ignore[dict-item]

    one = learner(evaluate=evaluate, evaluate_every=3)
    one.fit(7)
    assert seen == [3, 6, 7]
    assert one.model.training
    assert one.history[-1] == {"run": 0, "step": 7, "loss": 1.5}


def test_ledger_before_fit_raises() -> None:
    one = learner()
    with pytest.raises(NoLedger, match="has no ledger yet: call fit or repeat first"):
        one.accountant.mse_floor()
    assert isinstance(one.fit(3).accountant, FisherAccountant)
    assert learner(rules=None, worlds=None).accountant is None  # none is kept, as asked


def test_repr_shows_no_secrets() -> None:
    one = learner(seed=123456789)
    assert repr(one).endswith("not trained yet)")
    one.repeat(2, 3)
    assert f"{RECORDS} records of {FEATURES} features" in repr(one)
    assert repr(one).endswith("step 3 of 3 of run 2)")
    assert repr(one.accountant).endswith("worlds removed, rules exact, diagonal 'none', 2 runs finished)")
    for text in (repr(one), repr(one.accountant), repr(one.settings)):
        assert "123456789" not in text
        assert len(text) < 300


def test_settings_of_another_type_are_refused() -> None:
    x, y = data()
    with pytest.raises(InputError, match=r"settings must be a Settings.*, got 'a dict'"):
        PrivateSGD(network(), losses, x, y, {"noise_multiplier": 1.0})  # type: ignore[arg-type]
    for name in ("lr", "momentum", "weight_decay"):
        with pytest.raises(InputError, match=f"{name} must be at least 0, got -1"):
            settings(**{name: -1})


def test_without_accounting() -> None:
    one = learner(rules=None, worlds=None).fit(3)
    assert one.accountant is None
    assert torch.equal(flat(one.model), flat(learner().fit(3).model))


def test_epochs_are_passes_through_the_data() -> None:
    assert learner(sample_rate=0.25).fit(epochs=1.5).steps == 6
    for wrong in ({}, {"steps": 2, "epochs": 1.0}, {"steps": 0}, {"steps": 2.5}):
        with pytest.raises(InputError, match="steps"):
            learner().fit(**wrong)
    done = learner().fit(3)
    with pytest.raises(InputError, match=r"steps must stay 3, as fit began with: .* make a new PrivateSGD, .*, got 4"):
        done.fit(4)
    with pytest.raises(InputError, match=r"repeat cannot follow fit .*make a new .*repeat\(3 steps\) after fit"):
        done.repeat(2, 3)
    with pytest.warns(ReconboundWarning, match="fit has done its 3 steps already and trains nothing more: to"):
        done.fit(3)
    many = learner().repeat(2, 3)
    with pytest.warns(ReconboundWarning, match="repeat has done"):
        many.repeat(2, 3)
    assert many.repeat(3, 3).accountant.runs == 3


# --- caveats ---------------------------------------------------------------------------------


class FunctionalKinks(nn.Module):
    """A ReLU that no module shows: only the run of check_batch finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)))


@pytest.mark.parametrize(
    "model", [nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES)), FunctionalKinks()]
)
def test_floors_of_a_model_with_kinks_have_a_caveat(model, tmp_path) -> None:
    with pytest.warns(ReconboundWarning, match="kinks"):
        one = learner(model, check=True, diagonal="all", checkpoint=tmp_path / "run").fit(steps=4)
    ledger = one.accountant
    assert len(ledger.caveats) == 1
    assert ledger.caveats[0].lower().startswith("not proved: the model has kinks (relu")
    ledger.save(tmp_path / "ledger")
    back = FisherAccountant.load(tmp_path / "ledger")
    other = FisherAccountant(ledger.account, diagonal="all")
    other.merge(back)
    resumed = learner(model, diagonal="all", checkpoint=tmp_path / "run").fit(steps=4).accountant  # check=False
    for found in (ledger, back, other, resumed):
        assert ledger.caveats[0] in found.mse_floor().assumes
        assert ledger.caveats[0] in found.feature_floors().assumes
        assert found.summary()["caveats"] == list(ledger.caveats)


def test_floors_of_a_smooth_model_have_no_caveat() -> None:
    one = learner(check=True).fit(steps=4)
    assert one.accountant.caveats == ()
    assert "not proved" not in " ".join(one.accountant.mse_floor().assumes)


@pytest.mark.parametrize("frozen", [True, False])
def test_floors_of_an_embedding_describe_its_output(tmp_path, frozen: bool) -> None:
    x, y = data()
    model, tokens = Two(), torch.arange(RECORDS) % 6
    model.words.requires_grad_(not frozen)

    def made() -> PrivateSGD:
        return PrivateSGD(model, losses, (tokens, x), y, settings(), private=Private("module", "words"))

    if frozen:
        one = made()
    else:
        with pytest.warns(ReconboundWarning, match="do not cover all that is released.*which rows.*freeze it"):
            one = made()
    text = str(one.fit(4).accountant.mse_floor())
    assert "about the output of module 'words', not about what went into it (tokens)" in text
    assert ("not covered" in text) is not frozen
    one.accountant.save(tmp_path / "ledger")
    for ledger in (one.accountant, FisherAccountant.load(tmp_path / "ledger")):
        with pytest.raises(
            InputError, match="low and high, or radius, must be given: the private part is a module's output"
        ):
            ledger.guarantee(delta=1e-6)
        assert ledger.guarantee(low=-2.0, high=2.0).low == -2.0
        assert ledger.guarantee(radius=2.0).space.ball == 2.0
    assert learner().fit(4).accountant.guarantee().high == 1.0


def test_trained_embedding_reveals_its_rows() -> None:
    """Why it is not covered: the gradient that is released (with noise) is 0 but for the row that was used."""
    torch.manual_seed(0)
    model, x, y = Two(), *data()
    rows = []
    for token in range(6):
        problem = PrivateSGD(model, losses, (torch.full((RECORDS,), token), x), y, settings(), check=False)
        found, params = problem.measurer.gradient_sum(torch.tensor([0]))[0], problem.params
        own = dict(zip(params, found.split([p.numel() for p in params.values()]), strict=True))["words.weight"]
        rows.append(torch.nonzero(own.reshape(params["words.weight"].shape).abs().sum(1)).flatten().tolist())
    assert rows == [[token] for token in range(6)]
