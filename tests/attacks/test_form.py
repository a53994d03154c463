"""The contract of every attack: what was released and what the attacker knows go in, guesses come out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from learning import losses
from reconbound.attacks import (
    AttackerKnowledge,
    GLMAttack,
    Inversion,
    LikeliestGLMRecord,
    LikeliestRecord,
    Membership,
    OneOf,
    SGDKnowledge,
    Training,
    Transcript,
    train_many,
    transcript_of,
    with_expectation,
)
from reconbound.linear import Logistic, minimise
from reconbound.training.settings import Settings

RELEASES, FEATURES, RECORD = 5, 3, 2
ONE = slice(RECORD, RECORD + 1)


def small_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(14, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.arange(14) % 2


def linear_release() -> tuple[np.ndarray, AttackerKnowledge]:
    x, y = (v.numpy() for v in small_data())
    optimum = minimise(x, y.astype(float), Logistic(), l2=0.1, intercept=True)
    noise = np.random.default_rng(0).standard_normal((RELEASES, 1, FEATURES + 1))
    rest = np.arange(14) != RECORD
    known = AttackerKnowledge(x[rest], y[rest].astype(float), float(y[RECORD]), Logistic(), 0.1)
    return optimum.weights + 1e-4 * noise, known


def training_release(
    *, participation: bool = False, prior: bool = False, steps: int = 8, rate: float = 0.5
) -> tuple[Transcript, SGDKnowledge]:
    x, y = small_data()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    own = Settings(0.05, 1.0, rate, lr=0.3, seed=5, rules=None)
    rest = torch.arange(14) != RECORD
    known = SGDKnowledge(model, losses, own, y[ONE], x[rest].mean(0, keepdim=True), mean=x[rest].mean(0))
    if prior:
        known = with_expectation(known, x[rest])
    (released,) = train_many(Training(model, losses, x, y, own, steps), RELEASES, 7)
    return transcript_of(released, known, RECORD, x[RECORD], participation=participation), known


CANDIDATES = torch.rand(3, FEATURES, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
CASES: dict[str, tuple[Any, Callable[[], tuple[Any, Any]]]] = {
    "GLM, by the label": (GLMAttack(), linear_release),
    "GLM, by the constant feature": (GLMAttack("ratio"), linear_release),
    "GLM, likeliest": (LikeliestGLMRecord(), linear_release),
    "likeliest": (LikeliestRecord(), training_release),
    "likeliest, participation known": (LikeliestRecord(), lambda: training_release(participation=True)),
    "with a prior": (LikeliestRecord(inside=(0, 1)), lambda: training_release(prior=True)),
    "with a prior, participation known": (LikeliestRecord(), lambda: training_release(participation=True, prior=True)),
    "one of three": (OneOf(CANDIDATES), training_release),
    "membership": (Membership(CANDIDATES[0]), training_release),
    "inversion": (Inversion(starts=3), lambda: training_release(participation=True, steps=1, rate=1.0)),
}


def some(released: Any, which: list[int]) -> Any:
    return released.of(which) if isinstance(released, Transcript) else released[which]


@pytest.mark.parametrize("name", CASES)
def test_contract(name: str) -> None:
    attack, make = CASES[name]
    released, known = make()
    before = copy.deepcopy(released)
    found = attack(released, known)
    # one guess for each release, of the record's size, and finite
    if found.answers is not None:
        assert found.answers.shape == (RELEASES, FEATURES)
        assert found.answers.dtype == np.float64
        assert np.isfinite(found.answers).all()
    if found.scores is not None:
        assert found.scores.shape == (RELEASES, 3 if name == "one of three" else 1)
        assert np.isfinite(found.scores).all()
        assert found.choice.shape == (RELEASES,)
    assert found.answers is not None or found.scores is not None
    # the same again; nothing that went in has changed
    again = attack(released, known)
    for part in ("answers", "scores"):
        assert np.array_equal(getattr(found, part), getattr(again, part)) or getattr(found, part) is None
    if isinstance(released, Transcript):
        assert torch.equal(released.left, before.left)
        assert torch.equal(released.params, before.params)
    else:
        assert np.array_equal(released, before)
    # each guess is of its own release
    which = [3, 1]
    part = attack(some(released, which), known)
    for own, whole in ((part.answers, found.answers), (part.scores, found.scores)):
        if whole is not None and own is not None:
            assert np.allclose(own, whole[which], rtol=1e-5, atol=1e-6)
    # no value in the representation
    values = [v.flat[0] for v in (found.answers, found.scores) if v is not None]
    assert "confidential" in repr(found)
    assert not any(f"{v:.2f}" in repr(found) for v in values)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("GLM")])
def test_attackers_of_private_sgd_do_not_use_the_record_itself(name: str) -> None:
    attack, make = CASES[name]
    released, known = make()
    other = replace(known, like=torch.full_like(known.like, 0.123))
    for a, b in zip(vars(attack(released, known)).values(), vars(attack(released, other)).values(), strict=True):
        assert a is None or np.allclose(a, b, rtol=1e-9)


def test_public_features_are_used_and_kept() -> None:
    x, _ = small_data()
    released, known = training_release()
    half = replace(known, private=torch.tensor([2, 0]), mean=x.mean(0)[[2, 0]], like=x[ONE])
    found = LikeliestRecord()(released, half)
    assert found.answers is not None
    assert found.answers.shape == (RELEASES, 2)
    assert half.private_part(x[ONE]).tolist() == [[x[RECORD, 2], x[RECORD, 0]]]
    z = half.private_part(x[ONE])[0]
    full = known.log_ratio(released, x[RECORD])
    assert torch.allclose(half.log_ratio(released, z), full, rtol=1e-12)
    assert torch.allclose(half.information(released, z), known.information(released, x[RECORD])[[2, 0]][:, [2, 0]])


def test_attacks_find_the_record_at_small_noise() -> None:
    x, _ = small_data()
    released, known = linear_release()
    for attack in (GLMAttack(), LikeliestGLMRecord()):
        assert np.abs(attack(released, known).answers - x[RECORD].numpy()).max() < 0.05
    for name in ("likeliest", "likeliest, participation known", "with a prior"):
        attack, make = CASES[name]
        errors = np.abs(attack(*make()).answers - x[RECORD].numpy())
        assert np.median(errors) < 0.1
    released, known = training_release()
    among = torch.cat([CANDIDATES, x[ONE]])
    found = OneOf(among)(released, known)
    assert (found.choice == 3).all()
    assert np.allclose(found.answers, x[RECORD].numpy())
    assert (Membership(x[RECORD])(released, known).choice == 1).all()


def test_gradient_inversion_is_the_best_of_its_searches() -> None:
    released, known = training_release(participation=True, steps=1, rate=1.0)
    scale = torch.full((RELEASES,), released.scale, dtype=torch.float64)
    root = torch.eye(FEATURES, dtype=torch.float64)
    values = []
    for starts in (1, 3, 8):
        answers = torch.from_numpy(Inversion(starts=starts)(released, known).answers)
        values.append(known.likelihood(released, answers, root, scale)[0])
    assert bool((values[1] <= values[0] + 1e-9).all())
    assert bool((values[2] <= values[1] + 1e-9).all())


def test_what_an_attack_cannot_use_is_refused() -> None:
    released, known = training_release()
    with pytest.raises(ValueError, match="released must be single gradients"):
        Inversion()(released, known)
    with pytest.raises(ValueError, match=r"candidates must have shape \(k, 3\)"):
        OneOf(CANDIDATES[:, :2])(released, known)
    told, _ = training_release(participation=True)
    with pytest.raises(ValueError, match="must not say in which steps"):
        Membership(CANDIDATES[0])(told, known)
    with pytest.raises(ValueError, match="others must be at least 2 records"):
        with_expectation(known, CANDIDATES[:1])
    with pytest.raises(ValueError, match="mean must have 3 rows"):
        replace(known, mean=torch.zeros(2))
    with pytest.raises(ValueError, match="they chose among no candidates"):
        assert LikeliestRecord()(released, known).choice is None
