"""The same space, seeds and runs searched by a program of a peer's own and by `jaxdl.search`: is the best trial equal?

Samplers whose proposals do not depend on which process draws them: Optuna's `GridSampler` and Ray Tune's `grid_search`
against `grid` (every combination), and Optuna's `QMCSampler` with the scrambling of seed 0 against `qmc`. Optuna's
program trains its trials in its own process, Ray Tune's in workers of Ray; those of jaxdl are processes. Printed are
how many trials have the same settings, by how much their losses differ, and the best trial of each.

python -m benchmarks.studies.search_peers --folder runs/search_peers --trials 8
python -m benchmarks.studies.search_peers --folder runs/search_peers --peers ray    (pip install 'ray[tune]')
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import jaxdl

METRIC = "loss"
FIXED: dict[str, Any] = {
    "model.width": 4,
    "epochs": None,
    "steps": 40,
    "schedule.warmup_epochs": 0.2,
    "evaluation.every_epochs": 1,
    "mesh.replica": 1,
    "mesh.cpu_devices": 1,
    "report.tensorboard": False,
    "report.curves": False,
}
RATES, MOMENTA = (0.05, 0.2, 0.8), (0.8, 0.95)
CONFIG = str(Path(__file__).resolve().parents[2] / "configs" / "digits.py")


def by_optuna(sampler: str, trials: int, seed: int) -> list[tuple[dict[str, Any], float]]:
    """(settings, loss) of each trial of Optuna's program, in the order of the start."""
    import optuna

    def objective(trial: optuna.Trial) -> float:
        if sampler == "grid":
            rate: float = trial.suggest_categorical("optimizer.learning_rate", RATES)
            momentum: float = trial.suggest_categorical("optimizer.momentum", MOMENTA)
        else:
            rate = trial.suggest_float("optimizer.learning_rate", 0.02, 1.0, log=True)
            momentum = trial.suggest_float("optimizer.momentum", 0.5, 0.98)
        changes = {**FIXED, "optimizer.learning_rate": rate, "optimizer.momentum": momentum}
        loss = jaxdl.train(jaxdl.load(CONFIG, changes), quiet=True).metrics[METRIC]
        assert loss is not None
        return loss

    samplers = {
        "grid": lambda: optuna.samplers.GridSampler(
            {"optimizer.learning_rate": RATES, "optimizer.momentum": MOMENTA}, seed=seed
        ),
        "qmc": lambda: optuna.samplers.QMCSampler(
            qmc_type="sobol", scramble=True, seed=0, independent_sampler=optuna.samplers.RandomSampler(seed=seed)
        ),
    }
    study = optuna.create_study(direction="minimize", sampler=samplers[sampler]())
    study.optimize(objective, n_trials=len(RATES) * len(MOMENTA) if sampler == "grid" else trials)
    return [(dict(trial.params), float(trial.value or 0)) for trial in study.trials]


def by_ray_tune(folder: Path) -> list[tuple[dict[str, Any], float]]:
    """(settings, loss) of each trial of Ray Tune's program, a grid; a Ray cluster of two CPUs is started for it."""
    import ray  # pyright: ignore[reportMissingImports]
    from ray import tune  # pyright: ignore[reportMissingImports]

    def trainable(config: dict[str, Any]) -> None:
        metrics = jaxdl.train(jaxdl.load(CONFIG, {**FIXED, **config}), quiet=True).metrics
        tune.report({METRIC: metrics[METRIC]})

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    try:
        grid = {"optimizer.learning_rate": tune.grid_search(RATES), "optimizer.momentum": tune.grid_search(MOMENTA)}
        tuner = tune.Tuner(
            trainable,
            param_space=grid,
            tune_config=tune.TuneConfig(metric=METRIC, mode="min", max_concurrent_trials=1),
            run_config=tune.RunConfig(name="ray_tune", storage_path=str(folder.absolute()), verbose=0),
        )
        found = tuner.fit()
        assert not found.errors, found.errors
        trials = [(dict(trial.config or {}), float((trial.metrics or {})[METRIC])) for trial in found]
        best = found.get_best_result()
        assert (best.metrics or {})[METRIC] == min(loss for _, loss in trials)
        return trials
    finally:
        ray.shutdown()


def by_jaxdl(sampler: str, trials: int, folder: Path) -> list[tuple[dict[str, Any], float]]:
    """The same of `jaxdl.search`."""
    vary: dict[str, Any] = {"optimizer.learning_rate": "log:0.02:1", "optimizer.momentum": "uniform:0.5:0.98"}
    if sampler == "grid":
        vary = {"optimizer.learning_rate": list(RATES), "optimizer.momentum": list(MOMENTA)}
    settings = {"trials": None if sampler == "grid" else trials, "sampler": sampler, "scheduler": "none"}
    found = jaxdl.search(
        CONFIG, vary, folder / sampler, overrides=FIXED, metric=f"evaluation/{METRIC}", quiet=True, **settings
    )
    return [(trial.settings, float(trial.value or 0)) for trial in found.trials]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", nargs="+", choices=("optuna", "ray"), default=("optuna",))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for sampler in ("grid", "qmc") if "optuna" in options.peers else ("grid",):
        ours = by_jaxdl(sampler, options.trials, options.folder)
        if "optuna" in options.peers:
            compare(sampler, ours, "Optuna", by_optuna(sampler, options.trials, options.seed))
        if "ray" in options.peers and sampler == "grid":
            compare(sampler, ours, "Ray Tune", by_ray_tune(options.folder))


def compare(
    sampler: str, ours: list[tuple[dict[str, Any], float]], peer: str, theirs: list[tuple[dict[str, Any], float]]
) -> None:
    """Prints what both programs have found."""
    values = [{tuple(sorted(settings.items())): value for settings, value in every} for every in (ours, theirs)]
    shared = values[0].keys() & values[1].keys()
    differ = max((abs(values[0][one] - values[1][one]) for one in shared), default=float("nan"))
    best = [min(every, key=every.__getitem__) for every in values]
    print(f"{sampler}: {len(values[0])} trials of jaxdl and {len(values[1])} of {peer}, {len(shared)} with the same "
          f"settings, whose losses differ by {differ:.3g} at most")  # fmt: skip
    print(f"{sampler}: best of jaxdl  {dict(best[0])} {values[0][best[0]]!r}")
    print(f"{sampler}: best of {peer} {dict(best[1])} {values[1][best[1]]!r}", flush=True)


if __name__ == "__main__":
    main()
