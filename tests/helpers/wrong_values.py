"""Every public function and class with good arguments, and values that are wrong for most of them."""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

import reconbound as rb
from reconbound import fisher

#: What a user may hand over by mistake.
WRONG: dict[str, Any] = {
    "None": None,
    "text": "x",
    "empty text": "",
    "bytes": b"x",
    "list": [],
    "list of text": ["a", "b"],
    "lists of different lengths": [[1.0], []],
    "dict": {},
    "tuple": (1, "a"),
    "nan": math.nan,
    "inf": math.inf,
    "-1": -1,
    "0": 0,
    "0.5": 0.5,
    "1e400": 10**400,
    "True": True,
    "complex": 1 + 2j,
    "float32": np.float32(1),
    "int64": np.int64(2),
    "array": np.zeros((2, 3)),
    "array of nothing": np.zeros((0, 2)),
    "array of objects": np.array([None, "a"], dtype=object),
    "object": object(),
    "class": int,
    "function": len,
    "tensor": torch.zeros(3),
    "tensor of one": torch.tensor(1.0),
    "integers": torch.tensor([0, 99]),
    "generator": (k for k in range(2)),
    "module": nn.ReLU(),
}


#: Arguments that are called; what they raise reaches the user as it is.
OWN_FUNCTIONS = ("loss_fn", "evaluate", "initialise", "model")


@dataclass
class Case:
    """A call: good arguments, what is called with them, and what is done with the result."""

    name: str
    call: Callable[..., Any]
    good: Mapping[str, Callable[[], Any]]
    then: Callable[[Any], Any] = field(default=lambda found: found)
    sklearn: tuple[str, ...] = ()  # arguments that scikit-learn checks, in its own words
    called: Mapping[str, str] = field(default_factory=dict)  # what messages call an argument, where not by its name

    def run(self, argument: str | None = None, value: Any = None) -> BaseException | None:
        """Calls with this value for one argument; returns the error, or None."""
        given = {name: make() for name, make in self.good.items()}
        if argument is not None:
            given[argument] = value
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.then(self.call(**given))
        except Exception as error:
            return error
        return None

    def fault(self, argument: str, value: Any) -> str | None:
        """Describes in one line a call that ended badly; None where the value was accepted or clearly refused."""
        error = self.run(argument, value)
        if error is None:
            return None
        own, text = type(error).__module__.startswith("reconbound."), str(error).lower()
        if own and (argument.lower() in text or self.called.get(argument, argument).lower() in text):
            return None
        if own and argument == "data":  # messages name the file, or the option that does not fit it
            return None
        if (argument in OWN_FUNCTIONS and callable(value)) or (argument == "targets" and value is None):
            # a function of the user's, or what the loss makes of it: its errors are its own
            return None
        if argument in ("path", "checkpoint", "folder") and isinstance(error, OSError) and error.filename:
            return None  # the file system's own words name the file
        frames = traceback.extract_tb(error.__traceback__)
        if (
            argument in self.sklearn
            and isinstance(error, (ValueError, TypeError, OverflowError))
            and any("sklearn" in f.filename for f in frames)
        ):
            return None
        last = next((f for f in reversed(frames) if "reconbound" in f.filename), frames[-1])
        where = f"{Path(last.filename).name}:{last.lineno}"
        return f"{type(error).__name__}: {' '.join(str(error).split())[:150]} ({where})"


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return torch.rand(6, 3, generator=made), torch.tensor([0, 1, 0, 1, 0, 1])


def _loss(outputs: Any, targets: Any) -> Any:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def _settings(**changes: Any) -> rb.Settings:
    return rb.Settings(**{"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.5, "seed": 1, **changes})


def _account() -> rb.Account:
    return rb.Account(1.0, 1.0, 0.5, records=6, features=3, steps=2)


def _found() -> Any:
    inputs, targets = _data()
    return fisher.step_information(_model(), _loss, inputs[:2], targets[:2], max_grad_norm=1.0, noise_multiplier=1.0)


def _ledger(runs: int = 2) -> rb.FisherAccountant:
    ledger = rb.FisherAccountant(_account(), diagonal="all", spectral=False, keep_runs_at=[1, _account().steps])
    for _ in range(runs):
        for step in range(2):
            ledger.add([0, 1], _found_with_features())
            ledger.keep_step(step + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ledger.finish_run()
    return ledger


def ledger_with_worlds(runs: int = 2) -> rb.FisherAccountant:
    """A ledger of divergences only: of records that are left out, and of a number that is replaced."""
    inputs, targets = _data()
    ledger = rb.FisherAccountant(replace(_account(), rules=None), worlds=["<b>age</b>"])
    worlds = {"<b>age</b>": rb.Replacement(0.5, [0])}
    found = rb.step_distances(_model(), _loss, inputs, targets, worlds, max_grad_norm=1.0)
    for _ in range(runs):
        for _ in range(2):
            ledger.add_norms(range(6), found.clipped_norm)
            ledger.add_distances(range(6), found)
        ledger.finish_run()
    return ledger


def _found_with_features() -> Any:
    inputs, targets = _data()
    mechanism = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    options = fisher.StepOptions(diagonal=True)
    return fisher.step_information(_model(), _loss, inputs[:2], targets[:2], **mechanism, options=options)


def _distances() -> Any:
    inputs, targets = _data()
    return rb.step_distances(_model(), _loss, inputs[:2], targets[:2], {}, max_grad_norm=1.0)


def _table() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 2)) * 0.3
    return x, (x[:, 0] > 0).astype(int)


def _only(**made: Any) -> dict[str, Callable[[], Any]]:
    return {name: (lambda value=value: value) for name, value in made.items()}


def _learner(**changes: Any) -> rb.PrivateSGD:
    good = {"model": _model(), "loss_fn": _loss, "settings": _settings(), "progress": False, "check": False}
    good["inputs"], good["targets"] = _data()
    return rb.PrivateSGD(**{**good, **changes})


def _trained(learner: rb.PrivateSGD) -> None:
    learner.fit(2)
    repr(learner)
    if learner.accountant is not None:
        learner.accountant.summary()


def _mechanism_answers(found: rb.Mechanism) -> None:
    str(found), found.to_dict(), found.order2(), found.kl(), found.overlap(), found.rero(0.01)


def cases(folder: Path) -> Iterator[Case]:
    """All calls.

    Args:
        folder: an audit's, with its model.
    """
    x, y = _table()
    sgd: dict[str, Callable[[], Any]] = {
        "model": _model,
        "loss_fn": lambda: _loss,
        "inputs": lambda: _data()[0],
        "targets": lambda: _data()[1],
        "settings": _settings,
        "progress": lambda: False,
    }
    more = ("optimizer", "schedule", "initialise", "evaluate", "checkpoint", "private")
    sgd |= {**dict.fromkeys(more, lambda: None), "diagonal": lambda: "none", "spectral": lambda: False}
    sgd |= {"worlds": lambda: {"all": rb.Replacement(0.5)}}
    sgd |= _only(feature_scale=1.0, every=1, evaluate_every=1, callbacks=(), whole_at=(), check=False, shards=1)
    yield Case("PrivateSGD", rb.PrivateSGD, sgd, _trained)
    first = {name: sgd[name] for name in ("model", "loss_fn", "inputs", "targets", "settings", "private")}
    yield Case("PrivateSGD, checked", rb.PrivateSGD, first, _trained)
    yield Case(
        "PrivateSGD.fit", lambda steps, epochs: _learner().fit(steps, epochs=epochs), _only(steps=2, epochs=None)
    )
    yield Case("PrivateSGD.repeat", lambda runs, steps, epochs: _learner().repeat(runs, steps, epochs=epochs),
               _only(runs=2, steps=2, epochs=None))  # fmt: skip
    pairs = {"dataset": lambda: TensorDataset(*_data()), "collate": lambda: default_collate, **_only(workers=0)}
    yield Case("DatasetRows", rb.DatasetRows, pairs, lambda found: (len(found), found.digest))
    settings = {
        "noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.5, "sampler": "poisson", "clip": "smooth",
        "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "rules": (), "budget": 0.15, "probes": 1, "seed": 1,
        "micro_batch": None,
    }  # fmt: skip
    paper = _only(batch_size=2, records=8, noise_multiplier=1.0, max_grad_norm=1.0, lr=0.1)
    yield Case("Settings.paper", rb.Settings.paper, paper, lambda found: _trained(_learner(settings=found)))
    yield Case("Settings", rb.Settings, _only(**settings), lambda found: _trained(_learner(settings=found)))
    account = {
        "records": 6, "features": 3, "steps": 2, "noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.5,
        "sampler": "poisson", "clip": "smooth", "rules": (), "batches_per_epoch": None,
    }  # fmt: skip
    yield Case("Account", rb.Account, _only(**account), lambda found: (found.mechanism(), rb.FisherAccountant(found)))
    ledger = {
        "account": _account,
        **_only(diagonal="none", spectral=False, feature_scale=1.0, keep_runs_at=[1, 2], worlds=["w"], device="cpu"),
    }
    yield Case("FisherAccountant", rb.FisherAccountant, ledger, lambda found: (repr(found), found.dfil()))
    yield from _fisher_cases(sgd)
    yield from _ledger_cases(folder)
    yield from _linear_cases(x, y)
    yield from _mechanism_cases()
    release: dict[str, Callable[[], Any]] = {"folder": lambda: folder, "model": lambda: None}
    yield Case("load_release", rb.load_release, release, repr, called={"folder": "inputs.json"})
    yield from _table_cases(folder)
    bound = {
        "name": "n", "value": 1.0, "theorem": "t", "attacker": "any", "adjacency": "a", "sampler": "any", "assumes": (),
        "guess": None, "units": "", "coordinates": "average", "notes": (), "estimate": False, "proved": True,
        "limits": "", "measure": "error",
    }  # fmt: skip
    yield Case("Bound", rb.Bound, _only(**bound))  # results: their own makers fill them
    yield Case("Guarantee", rb.Guarantee, _only(**vars(rb.guarantee(rb.DP(1.0)))))


def _fisher_cases(sgd: Mapping[str, Callable[[], Any]]) -> Iterator[Case]:
    problem = {name: sgd[name] for name in ("model", "loss_fn", "inputs", "targets")}
    mechanism = _only(max_grad_norm=1.0, clip="smooth")
    step = {**problem, **mechanism, **_only(noise_multiplier=1.0, options=rb.StepOptions())}
    yield Case("step_information", rb.step_information, step, repr)
    sums = {**problem, **mechanism, **_only(options=rb.SumOptions())}
    yield Case("clipped_gradient_sum", rb.clipped_gradient_sum, sums)
    worlds = {"worlds": lambda: {"all": rb.Replacement(0.5)}}
    yield Case("step_distances", rb.step_distances, {**problem, **worlds, **mechanism, "options": rb.SumOptions}, repr)
    replacement = _only(values=0.5, features=[0], part="input", name=None)
    yield Case("Replacement", rb.Replacement, replacement, lambda found: found(torch.ones(2, 3), torch.ones(2)))
    yield Case("check_batch", rb.check_batch, {**problem, "private": lambda: None})
    yield Case("check_model", rb.check_model, {"model": _model})

    def measure(options: rb.StepOptions) -> Any:
        return rb.step_information(_model(), _loss, *_data(), max_grad_norm=1.0, noise_multiplier=1.0, options=options)

    plain = _only(micro_batch=None, mask=torch.ones(6), method="auto", checked=False)
    more = _only(private=None, diagonal=False, spectral=False, probes=rb.ProbeOptions())
    probes = _only(count=1, space="auto", deflate=2, directions=None, error="auto", generator=None)
    yield Case("SumOptions", rb.SumOptions, plain)
    yield Case("StepOptions", rb.StepOptions, {**plain, **more}, measure)
    yield Case("ProbeOptions", rb.ProbeOptions, probes, lambda found: measure(rb.StepOptions(probes=found)))
    private = _only(part="input", name=None, features=[0])
    yield Case("Private", rb.Private, private, lambda found: measure(rb.StepOptions(private=found)))
    yield Case("StepInformation", rb.StepInformation, _only(**vars(_found())))  # results: their own makers fill them
    yield Case("StepDistances", rb.StepDistances, _only(**vars(_distances())))


def _table_cases(folder: Path) -> Iterator[Case]:
    frame = pd.DataFrame({"age": range(20, 44), "income": [0, 1] * 12})

    def load(data: Any, options: Any, changes: Any) -> Any:
        return rb.load_dataset(data, options, target=changes)

    made: dict[str, Callable[[], Any]] = {"data": lambda: frame, "options": lambda: None, "changes": lambda: "income"}
    yield Case("load_dataset", load, made, repr, called={"changes": "target"})
    few = {"steps": 1, "runs": 1, "model": "linear", "seed": 1}
    good: dict[str, Callable[[], Any]] = {"data": lambda: frame, "out": lambda: str(folder / "audit")}
    good |= _only(target="income", private=["age"], ranges={"age": (0, 100)}, options=few, fresh=True)
    good |= _only(publish_accuracy=False)
    yield Case("audit", rb.audit, good, repr)


def _ledger_cases(folder: Path) -> Iterator[Case]:
    def method(name: str, **good: Any) -> Case:
        def call(**given: Any) -> Any:
            return getattr(_ledger(), name)(**given)

        return Case(
            f"FisherAccountant.{name}", call, {k: v if callable(v) else (lambda v=v: v) for k, v in good.items()}
        )

    yield method("add", indices=[0, 1], found=_found_with_features, weight=1.0, stratified=False)
    yield method("add_distances", indices=[0, 1], found=_distances, weight=1.0, stratified=False)
    yield method("divergence", world="removed", confidence=0.95)
    yield method("max_success", baseline=0.1, world="removed", confidence=0.95)
    yield method("mean_feature_floors", variance=1.0, groups=[0] * _ledger().account.records)
    norms = _only(indices=[0, 1], clipped_norm=torch.ones(2), weight=1.0, stratified=False)
    empty = lambda **given: rb.FisherAccountant(_account()).add_norms(**given)  # noqa: E731
    yield Case("FisherAccountant.add_norms", empty, norms, called={"clipped_norm": "indices"})
    yield method("follow", found=_found_with_features)
    yield method("begin_run", fingerprint="0" * 32)
    yield method("dfil", rule=None)
    yield method("trace", rule=None)
    yield method("keep_step", step=1)
    yield method("mse_floor", rule=None)
    yield method("no_limit_because", rule=None)
    yield method("standard_error", rule=None)
    yield method("upper", rule=None, confidence=0.95, warn=True)
    yield method("lower_limit", rule=None, confidence=0.95)
    yield method("group_floor", rows=[0, 1], rule=None, confidence=0.95)
    yield method("most_exposed", k=2, rule=None)
    yield method("feature_floors", average=False)
    yield method("guarantee", copies=1, low=0.0, high=1.0, radius=None, delta=1e-5, baseline=None, units="")
    yield method("merge", other=_ledger)
    yield method("save", path=folder / "ledger.safetensors")
    restore = method("restore", tensors=lambda: _ledger().state(), runs=2)
    yield replace(restore, called={"tensors": "trace", "runs": "fingerprints"})
    _ledger().save(folder / "saved.safetensors")
    yield Case(
        "FisherAccountant.load", rb.FisherAccountant.load, _only(path=folder / "saved.safetensors", device="cpu")
    )


def _linear_cases(x: np.ndarray, y: np.ndarray) -> Iterator[Case]:
    both = dict(l2=0.1, noise_std=0.1, target_mse=None, target_epsilon=None, target_delta=None, data_norm=1.0,
                fit_intercept=True, allow_constant_columns=False, allow_wide=False, random_state=1)  # fmt: skip
    for kind, own in ((rb.PrivateLogisticRegression, {"classes": None}), (rb.PrivateRidge, {"target_bound": 1.0})):
        name, good = kind.__name__, _only(**both, **own)
        yield Case(name, kind, good, lambda model: model.fit(x, y))
        aim = {**both, "noise_std": None, "target_epsilon": 1.0, "target_delta": 1e-5}
        yield Case(f"{name} by ε", kind, _only(**aim, **own), lambda model: model.fit(x, y))

        def made(kind: Any = kind, own: Any = own) -> Any:
            return kind(**both, **own)

        yield Case(f"{name}.fit", lambda X, y, made=made: made().fit(X, y), _only(X=x, y=y), sklearn=("X", "y"))
        yield Case(f"{name}.solve", lambda X, y, made=made: made().fit(x, globals()["_table"]()[1]).solve(X, y),
                   _only(X=x, y=y), sklearn=("X", "y"))  # fmt: skip
        yield Case(f"{name}.predict", lambda X, made=made: made().fit(x, y).predict(X), _only(X=x), sklearn=("X",))
        yield Case(
            f"{name}.leakage",
            lambda X, y, scale, diagonal, spectral, made=made: made().fit(x, _table()[1]).leakage(
                X, y, scale=scale, diagonal=diagonal, spectral=spectral
            ),
            _only(X=x, y=y, scale=None, diagonal=True, spectral=True), sklearn=("X", "y"),
        )  # fmt: skip


def _mechanism_cases() -> Iterator[Case]:
    import dp_accounting.pld.privacy_loss_distribution as losses

    space = dict(dim=2, low=0.0, high=1.0, radius=None, baseline=None, units="")
    mechanism = rb.DP(1.0, adjacency="replace-one")
    yield Case("guarantee", rb.guarantee, _only(mechanism=mechanism, delta=1e-5, **space), str)
    yield Case("floor", rb.floor, _only(name="lecam", mechanism=mechanism, **space), str, called={"name": "bound"})
    kinds = {
        rb.DP: dict(epsilon=1.0, delta=0.0, adjacency="replace-one"),
        rb.RenyiDP: dict(epsilon=1.0, order=2.0, adjacency="replace-one"),
        rb.SampledGaussian: dict(noise_multiplier=2.0, sample_rate=0.5, steps=3, clip="smooth", sampler="poisson"),
        rb.OutputPerturbation: dict(records=100, l2=0.1, noise_std=0.1, data_norm=1.0, loss="logistic",
                                    target_bound=None, intercept=False),
        rb.PLD: dict(pld=losses.from_laplace_mechanism(2.0), adjacency="add/remove"),
        rb.GDP: dict(mu=1.0, adjacency="replace-one"),
        rb.ZCDP: dict(rho=0.1, xi=0.0, adjacency="replace-one"),
        rb.Laplace: dict(noise_multiplier=2.0, sample_rate=0.5, steps=3),
        rb.DiscreteGaussian: dict(noise_std=2.0, sensitivity=1, steps=3),
        rb.Composition: dict(mechanisms=(rb.Laplace(2.0), rb.SampledGaussian(2.0, 0.5, 3))),
    }  # fmt: skip
    for kind, good in kinds.items():
        yield Case(kind.__name__, kind, _only(**good), _mechanism_answers)
        for method, own in {"epsilon_at": {"delta": 1e-5, "adjacency": "replace-one"}, "rero": {"kappa": 0.1},
                            "for_group": {"copies": 1}, "protection": {"delta": 1e-5}}.items():  # fmt: skip
            made = kind(**good)
            yield Case(f"{kind.__name__}.{method}", getattr(made, method), _only(**own))
    asked = dict(adjacency="replace-one", fprs=[0.1], priors=[0.5], baselines=[0.01], group=1)
    yield Case("risks", rb.risks, _only(mechanism=rb.SampledGaussian(2.0, 0.5, 3), **asked), repr)
    yield Case("Risks", rb.Risks, _only(**vars(rb.risks(mechanism))))  # results: their own makers fill them
    stretches = [dict(noise_multiplier=2.0, sample_rate=0.5, steps=3)]
    yield Case(
        "schedule", rb.schedule, _only(stretches=stretches), _mechanism_answers, called={"stretches": "schedule"}
    )
    opacus = _only(given=[(2.0, 0.5, 3)], sampler="poisson", clip="hard")
    yield Case("from_opacus", rb.from_opacus, opacus, _mechanism_answers, called={"given": "opacus_state"})
    shuffled = dict(noise_multiplier=2.0, per_epoch=3, steps=3, clip="smooth")
    yield Case("SampledGaussian.shuffled", rb.SampledGaussian.shuffled, _only(**shuffled), _mechanism_answers)
