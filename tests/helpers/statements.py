"""Audits without training, of any noise, floors and shape of data, to test the texts of the pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from reconbound import guarantee
from reconbound.mechanisms import SampledGaussian
from reconbound.report.folder import Leakage, Run

#: Noise multipliers of 20 steps at q = 0.1 whose ε goes from 1e-6 to what cannot be told from infinity.
NOISES = (3e6, 30.0, 3.0, 0.8, 0.3, 0.045, 1e-4)


def synthetic_audit(
    noise: float,
    kind: str = "image",
    *,
    level: float = 2.0,
    records: int = 40,
    features: int = 9,
    runs: int = 5,
    measured: str = "all",
    relative: float = 0.1,
    constant: bool = False,
    task: str = "classes",
    **data: Any,
) -> tuple[Run, Leakage]:
    """Returns an audit whose floors are `level` times the error of a guess, spread by a factor of 2 over the records.

    Args:
        measured: "all", "some" (every other record) or "none".
        relative: standard error of dFIL over dFIL.
        constant: whether the first column has one value.
        data: facts of the data that replace the plain ones.
    """
    rng = np.random.default_rng(0)
    image = kind == "image"
    side = int(features**0.5)
    shape = (1, side, side) if image else (features,)
    values = rng.random((records, *shape))
    flat = values.reshape(records, -1)
    if constant:
        flat[:, 0] = 0.25
    guess = torch.from_numpy(flat.var(axis=0))
    often = {"all": np.ones(records), "some": np.arange(records) % 2, "none": np.zeros(records)}[measured]
    spread = np.exp(np.linspace(0, -2 * np.log(2), records))  # the first is the most exposed
    base = float(guess.mean()) if float(guess.mean()) > 0 else 1.0
    dfil = torch.from_numpy(spread / (base * level**2) * (often > 0))[None]
    seen = torch.nonzero(torch.from_numpy(often)).flatten()
    kept = torch.cat([seen[:3], seen[-2:]]) if len(seen) > 5 else seen
    diagonal = dfil[0][:, None].expand(records, features)
    columns = [f"c{j}" for j in range(features)]
    facts = {
        "rules": ["exact"], "confidence": 0.95, "task": task, "most": min(3, len(kept)), "class_names": ["no", "yes"],
        "feature_names": columns, "units": [""] * features, "scale": 255.0 if image else 1.0, "offset": 0.0,
        "private": None, "target_name": "answer", "inferred_ranges": False,
    }  # fmt: skip
    leakage = Leakage(
        dfil=dfil,
        error=relative * dfil,
        upper=2 * dfil if runs > 1 else None,
        measured=torch.from_numpy(often * 30).long(),
        targets=torch.arange(records) % 2,
        kept=kept,
        kept_inputs=torch.from_numpy(values[kept.numpy()]).float(),
        kept_diagonal=diagonal[kept],
        average_diagonal=diagonal.mean(0),
        diagonal=None if image else diagonal,
        history_step=torch.tensor([10, 20]),
        history=torch.full((2, 3), 0.1, dtype=torch.float64),
        accuracy_step=torch.tensor([20]),
        accuracy=torch.tensor([0.8], dtype=torch.float64),
        guess=guess,
        facts=facts,
    )
    mechanism = SampledGaussian(noise, 0.1, 20)
    about = {"name": "made up", "kind": kind, "records": records, "features": features, "task": task}
    about |= {"shape": list(shape), "range": [0.0, 255.0], "unit": ""} if image else {
        "private": columns, "public": [], "ranges": {name: [0.0, 1.0] for name in columns}, "units": {}}  # fmt: skip
    numbers = {"noise_multiplier": noise, "max_grad_norm": 1.0, "sample_rate": 0.1, "steps": 20, "clip": "smooth"}
    numbers |= {"sampler": "poisson", "runs": runs}
    found = guarantee(mechanism, dim=features).to_dict()
    return Run({**about, **data}, numbers, {"model": "linear"}, found, caveats={}), leakage
