"""`configs/tabular.py` against scikit-learn's perceptron and gradient boosting, on tables that packages ship.

    pip install --no-deps ISLP plotnine
    python -m benchmarks.tables --seeds 3 --to tables.json

Every method is given the same rows, held out by `--data.split-seed`, and its defaults: `MLPClassifier` and
`MLPRegressor` (500 iterations at most; the label standardized) after a `ColumnTransformer` that fills gaps, scales
numbers and makes words one-hot; `HistGradientBoostingClassifier` and `-Regressor` with words as categories; jaxdl as
the config has it. Reported are log loss and accuracy, or the root of the mean squared error and R2, of held-out rows:
the mean over the seeds, and the standard deviation.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxdl
from jaxdl.data import ColumnsSpec, Table


class Set(NamedTuple):
    """A table that a package ships: its file in the package, the label, and columns that tell the label."""

    package: str
    file: str
    label: str
    leave_out: tuple[str, ...] = ()


SETS = {
    "penguins": Set("plotnine", "data/penguins.csv", "species"),
    "OJ": Set("ISLP", "data/OJ.csv", "Purchase"),
    "Default": Set("ISLP", "data/Default.csv", "default"),
    "Carseats": Set("ISLP", "data/Carseats.csv", "Sales"),
    "Wage": Set("ISLP", "data/Wage.csv", "wage", ("logwage",)),
    "Hitters": Set("ISLP", "data/Hitters.csv", "Salary"),
    "mpg": Set("plotnine", "data/mpg.csv", "hwy", ("cty",)),
    "Bikeshare": Set("ISLP", "data/Bikeshare.csv", "bikers", ("casual", "registered")),
}


def path_of(table: Set) -> str:
    """The file, without an import of its package. Exits with a message where it is not installed."""
    package = importlib.util.find_spec(table.package)
    if package is None or package.origin is None:
        raise SystemExit(f"{table.package} is not installed: pip install --no-deps {table.package}")
    return str(Path(package.origin).parent / table.file)


def jaxdl_scores(table: Set, seed: int, changes: dict[str, Any]) -> dict[str, float]:
    """The metrics of the config on held-out rows, without any setting but the file and the label."""
    fields = {"data.file": (path_of(table),), "data.label": table.label, "data.leave_out": table.leave_out}
    fields |= {"data.split_seed": seed, "seed": seed, "mesh.cpu_devices": None} | changes
    fields |= {"report.tensorboard": False, "report.curves": False, "evaluation.every_steps": None}
    root = Path(__file__).resolve().parents[1]
    run = jaxdl.train(jaxdl.load(str(root / "configs" / "tabular.py"), fields), quiet=True, devices=jax.devices()[:1])
    return {name: float(value) for name, value in run.metrics.items() if value is not None}


def scikit_learn(table: Set, seed: int) -> dict[str, dict[str, float]]:
    """The metrics of both methods of scikit-learn on the same rows."""
    import pandas as pd
    from sklearn.compose import make_column_transformer
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.impute import SimpleImputer
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

    data = Table(file=(path_of(table),), label=table.label, leave_out=table.leave_out, split_seed=seed)
    splits = data.build()
    spec = splits.train.spec
    assert isinstance(spec, ColumnsSpec)
    frame = pd.read_csv(path_of(table))
    words = [column.name for column in spec.word_columns]
    numbers = [column.name for column in spec.columns if column.num_words is None]
    x, y = frame[[*numbers, *words]].astype(dict.fromkeys(words, object)), frame[table.label].to_numpy()
    train, test = (source.rows for source in (splits.train, splits.test))  # pyright: ignore[reportAttributeAccessIssue]
    classes = bool(spec.label.classes)
    one_hot = make_column_transformer(
        (make_pipeline(SimpleImputer(strategy="median"), StandardScaler()), numbers),
        (make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(handle_unknown="ignore")), words),
    )
    ordinal = make_column_transformer(
        ("passthrough", numbers), (OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan), words)
    )
    categories: Any = [False] * len(numbers) + [True] * len(words)
    mlp = MLPClassifier if classes else MLPRegressor
    boosting = HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor
    models = {
        "MLP": make_pipeline(one_hot, mlp(random_state=seed, max_iter=500)),
        "HistGradientBoosting": make_pipeline(ordinal, boosting(random_state=seed, categorical_features=categories)),
    }
    scores = {}
    mean, std = (0.0, 1.0) if classes else (y[train].mean(), y[train].std())
    for name, model in models.items():
        model.fit(x.iloc[train], y[train] if classes else (y[train] - mean) / std)
        if not classes:
            error = model.predict(x.iloc[test]) * std + mean - y[test]
            scores[name] = {
                "rmse": math.sqrt((error**2).mean()),
                "r2": 1 - (error**2).mean() / y[test].astype(float).var(),
            }
            continue
        probabilities = model.predict_proba(x.iloc[test])
        place = np.array([list(model.classes_).index(value) for value in y[test]])
        of_label = np.clip(probabilities[np.arange(len(test)), place], 1e-12, 1)
        scores[name] = {
            "loss": -float(np.log(of_label).mean()),
            "accuracy": float((probabilities.argmax(axis=1) == place).mean()),
        }
    return scores


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--changes", type=json.loads, default={}, help="fields of the experiment, as JSON")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    every: dict[str, Any] = {}
    for name in options.sets:
        rows: dict[str, list[dict[str, float]]] = {}
        for seed in range(options.seeds):
            start = time.process_time()
            for method, scores in scikit_learn(SETS[name], seed).items():
                rows.setdefault(method, []).append(scores)
            between = time.process_time()
            rows.setdefault("jaxdl", []).append(jaxdl_scores(SETS[name], seed, options.changes))
            print(
                f"  {name} seed {seed}: {between - start:.0f} + {time.process_time() - between:.0f} CPU s", flush=True
            )
        every[name] = rows
        names = [metric for metric in ("loss", "accuracy", "rmse", "r2") if metric in rows["MLP"][0]]
        for method, of_seeds in rows.items():
            values = {metric: [scores[metric] for scores in of_seeds] for metric in names}
            shown = ", ".join(f"{metric} {np.mean(x):.5g} +- {np.std(x):.2g}" for metric, x in values.items())
            print(f"{name}: {method}: {shown}", flush=True)
        if options.to is not None:
            options.to.write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
