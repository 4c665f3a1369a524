"""A search by several metrics: its Pareto front, who proposes settings, its report, and what it is given."""

import json
import random
import re
from types import SimpleNamespace

import optuna
import pytest
from search_made_up import MadeUp, Said, course, request_in

from jaxdl.core.errors import ConfigError
from jaxdl.core.kinds import kinds
from jaxdl.platform.search import command
from jaxdl.platform.search.config import SearchConfig, objectives_of
from jaxdl.platform.search.copies import write_copies
from jaxdl.platform.search.driver import Search
from jaxdl.platform.search.function import _result
from jaxdl.platform.search.journal import STUDY, Journal, storage_at
from jaxdl.platform.search.metrics import metrics_of, value_at
from jaxdl.platform.search.report import result, write_report
from jaxdl.platform.search.samplers import NSGA2, Random, Sampler
from jaxdl.platform.search.schedulers import PBT, Full, is_plateau
from jaxdl.platform.search.show import SearchView, table
from jaxdl.platform.search.space import parse_settings
from jaxdl.platform.search.trial import Objective, Trial, best, front
from jaxdl.training.experiment import Experiment

TWO = ("maximize", "minimize")


def finished(points):
    return [
        Trial(number, {}, 9, {9: first}, "finished", others=(*rest,)) for number, (first, *rest) in enumerate(points)
    ]


@pytest.mark.parametrize("directions", [TWO, ("minimize", "minimize"), ("maximize", "minimize", "maximize")])
@pytest.mark.parametrize("seed", range(4))
def test_the_front_is_that_of_brute_force_and_of_optuna(directions, seed, tmp_path):
    draw = random.Random(seed)
    points = [tuple(draw.choice((draw.random(), draw.randrange(4) / 4)) for _ in directions) for _ in range(40)]
    points += points[:3]  # Equal ones are all on the front, or none is.
    trials = finished(points)
    costs = [[-x if way == "maximize" else x for x, way in zip(point, directions, strict=True)] for point in points]
    beaten = set()
    for a, mine in enumerate(costs):
        for other in costs:
            no_worse = sum(x <= y for x, y in zip(other, mine, strict=True))
            better = sum(x < y for x, y in zip(other, mine, strict=True))
            if no_worse == len(directions) and better:
                beaten.add(a)
    found = [trial.number for trial in front(trials, directions)]
    assert found == [number for number in range(len(points)) if number not in beaten]
    assert best(trials, *directions).number in found
    objectives = [Objective(f"eval/{place}", way) for place, way in enumerate(directions)]
    write_copies(tmp_path / "optuna.log", trials, [], objectives)
    study = optuna.load_study(study_name=STUDY, storage=storage_at(tmp_path / "optuna.log"))
    assert [trial.number for trial in study.best_trials] == found
    assert [way.name.lower() for way in study.directions] == list(directions)
    assert study.metric_names == [objective.metric for objective in objectives]


def test_one_metric_has_the_best_trials_as_its_front():
    trials = finished([(0.5,), (0.9,), (0.9,)])
    assert [trial.number for trial in front(trials, ("maximize",))] == [1, 2]
    assert best(trials, "maximize").number == 1


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("name", ["nsga2", "qmc", "random", "tpe"])
def test_proposals_are_those_of_an_optuna_program_with_the_same_seeds(name):
    """The program keeps one study and tells it two values of each trial."""
    settings = parse_settings(["a=log:0.001:1", "b=int:1:8", "c=x,y", "d=uniform:0:1 if c=x"])
    sampler = kinds(Sampler)[name](**({"population": 6} if name == "nsga2" else {}))
    study, trials, attributes = optuna.create_study(directions=TWO), [], {}
    for number in range(36):
        proposal = sampler.propose(settings, trials, TWO, 5, attributes)
        attributes = proposal.study_attributes
        study.sampler = sampler.make(random.Random(f"5 {number}").randrange(2**31))
        asked = study.ask()
        theirs = {"a": asked.suggest_float("a", 1e-3, 1, log=True), "b": asked.suggest_int("b", 1, 8),
                  "c": asked.suggest_categorical("c", ["x", "y"])}  # fmt: skip
        if theirs["c"] == "x":
            theirs["d"] = asked.suggest_float("d", 0, 1)
        assert proposal.settings == theirs
        point = (-abs(theirs["a"] - 0.03) + theirs["b"] / 50, float(theirs["b"] ** 2) + theirs.get("d", 0.5))
        trial = Trial(number, theirs, 9, {9: point[0]}, "finished", others=point[1:], attributes=proposal.attributes)
        trials.append(trial)
        study.tell(asked, point)
    assert len({trial.settings["a"] for trial in trials}) > 10


def test_a_trial_that_failed_does_not_stop_the_proposals():
    settings = parse_settings(["a=log:0.001:1", "b=int:1:8"])
    for name, kind in kinds(Sampler).items():
        if kind.several and name != "grid":
            trials = [Trial(n, {"a": 0.1, "b": 1 + n % 8}, 9, {9: 0.1}, "finished", others=(n,)) for n in range(14)]
            trials += [Trial(14, {"a": 0.9, "b": 8}, 9, {}, "failed"), Trial(15, {"a": 0.9, "b": 8}, 9)]
            assert set(kind().propose(settings, trials, TWO, 0, {}).settings) == {"a", "b"}, name


class Measuring(MadeUp):
    """Trials with a rate and a size: the better the loss the slower, but for the last, which others beat."""

    def write(self, number, row):
        for step, rate in ((3, 1.0), (6, 50.0 + 10 * number), (9, 1e9)):
            super().write(number, {"step": step, "examples_per_sec": rate if number < 3 else 0.5})
        super().write(number, row)
        summary = {"num_params": 100 * (number + 1)}
        (self.request.workdir(number) / "summary.json").write_text(json.dumps(summary))


def request_of_three(folder):
    others = (Objective("examples_per_sec", "maximize"), Objective("num_params", "maximize"))
    return request_in(folder, metric="eval/loss", others=others)


def play(request, trials=4):
    journal, said = Journal(request.folder / "journal.log", list(request.settings), *request.directions), Said()
    workers = Measuring(request, lambda number, start: 4 if (number, start) == (9, 1) else 0)
    Search(request, journal, Random(), Full().policy(course(trials)), workers, said).run()
    return journal.trials(), said


def test_a_search_by_three_metrics(tmp_path, on_command_line, monkeypatch):
    for plot in ("history", "curves", "slices", "parallel", "importances"):
        monkeypatch.setattr(f"jaxdl.platform.search.plots.{plot}", lambda *args: None)
    request = request_of_three(tmp_path)
    trials, said = play(request)
    assert [trial.point for trial in trials] == [(1.0, 50.0, 100.0), (2.0, 60.0, 200.0), (3.0, 70.0, 300.0),
                                                 (4.0, 0.5, 400.0)]  # fmt: skip
    assert "trial 1 at step 9: eval/loss 2, examples_per_sec 60, num_params 200" in said.events
    shown = SearchView(request, course(4), Full())
    found = result(request, trials, shown)
    assert found["front"] == [0, 1, 2, 3]
    assert found["best"]["number"] == 0
    assert found["metrics"] == {"eval/loss": "minimize", "examples_per_sec": "maximize", "num_params": "maximize"}
    assert found["trials"][2]["metrics"] == {"eval/loss": 3.0, "examples_per_sec": 70.0, "num_params": 300.0}
    write_report(tmp_path, request, trials, found, shown)
    page = (tmp_path / "report.md").read_text()
    assert "| 1 | 2 | 60 | 200 |" in page
    assert "![The Pareto front" in page
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    lines = command._lines(SimpleNamespace(workdir=tmp_path), found)
    assert "        trial 3: eval/loss 4, examples_per_sec 0.5, num_params 400" in lines
    assert [str(column.header) for column in table(shown, trials, []).columns][-3:] == list(found["metrics"])
    outcome = SimpleNamespace(request=request, trials=trials, report=found, time_is_over=False)
    told = _result(tmp_path, outcome)
    assert [trial.number for trial in told.front] == [0, 1, 2, 3]
    assert told.best.metrics == {"eval/loss": 1.0, "examples_per_sec": 50.0, "num_params": 100.0}
    assert list(told.frame()["num_params"]) == [100.0, 200.0, 300.0, 400.0]
    assert "4 of them on the front" in repr(told)
    assert told._repr_html_().count("<th>") == 4 + len(request.objectives)
    assert [trial.values for trial in told.study().best_trials] == [list(trial.point) for trial in trials]


def test_a_kill_between_the_values_and_the_end_loses_none(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*args):
        raise Killed

    request = request_of_three(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "finish", killed)
        with pytest.raises(Killed):
            play(request, trials=1)
    (trial,), _ = play(request, trials=1)
    assert (trial.state, trial.point) == ("finished", (1.0, 50.0, 100.0))


def test_where_metrics_come_from(tmp_path):
    rows = [{"step": 2, "examples_per_sec": 1.0}, {"step": 4, "examples_per_sec": 5.0, "eval/loss": 0.5},
            {"step": 6, "examples_per_sec": None}, {"step": 8, "examples_per_sec": 7.0},
            {"step": 8, "eval/loss": 0.25}]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert value_at(tmp_path, "examples_per_sec", 8) == (5.0, ""), "the median"
    assert value_at(tmp_path, "examples_per_sec", 3) == (3.0, ""), "of the reports up to the stop"
    assert value_at(tmp_path, "eval/loss", 5) == (0.25, "")
    assert value_at(tmp_path, "num_params", 8) == (None, "its summary.json has no num_params")
    (tmp_path / "summary.json").write_text('{"num_params": 12}')
    assert value_at(tmp_path, "num_params", 8) == (12.0, "")
    assert metrics_of(tmp_path) == ["eval/loss", "examples_per_sec", "num_params"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "scheduler asha compares trials by one. Give scheduler none"),
        ({"scheduler": PBT()}, "scheduler pbt compares"),
        (
            {"scheduler": Full(), "sampler": "cmaes"},
            "proposes settings for one. Choose one of grid, nsga2",
        ),
        ({"scheduler": Full(), "direction": ("maximize",)}, "there are 2 metrics"),
        ({"scheduler": Full(), "metric": ("eval/loss", "evaluation/loss")}, "eval/loss is given twice"),
        ({"scheduler": Full(), "metric": ("eval/loss", "train/grad_norm")}, "one for each of the 2 metrics"),
    ],
)
def test_what_does_not_go_together_is_refused(given, message):
    config = SearchConfig().replaced({"metric": ("evaluation/accuracy", "num_params"), **given})
    with pytest.raises(ConfigError, match=message):
        objectives_of(config, Experiment())


def test_directions_of_rates_and_sizes_are_known_and_one_metric_is_one_word():
    config = SearchConfig(metric=("evaluation/accuracy", "num_params", "tokens_per_sec"), scheduler=Full())
    assert objectives_of(config, Experiment()) == (
        Objective("eval/accuracy", "maximize"), Objective("num_params", "minimize"),
        Objective("tokens_per_sec", "maximize"),
    )  # fmt: skip
    for given in ("eval/x", ("eval/x",)):
        one = SearchConfig.model_validate({"metric": given, "direction": "minimize"})
        assert objectives_of(one, Experiment()) == (Objective("eval/x", "minimize"),)
    assert SearchConfig.model_validate({"metric": None, "direction": None}) == SearchConfig()


def test_a_plateau_of_several_metrics_is_that_no_point_is_new_on_the_front():
    points = [(0.5, 10.0), (0.6, 20.0), (0.5, 10.0), (0.4, 30.0), (0.7, 40.0), (0.6, 20.0)]
    trials = finished(points)
    known = [is_plateau(trials[:n], points[:n], TWO, 2) for n in range(1, 7)]
    assert known == [False, False, False, True, False, False]


def test_a_generation_of_nsga2_follows_the_one_before():
    """After the first generation its proposals are children of good trials, and no independent draws."""
    settings = parse_settings(["a=uniform:0:1", "b=uniform:0:1"])
    trials, attributes = [], {}
    for number in range(60):
        proposal = NSGA2(population=10).propose(settings, trials, ("minimize", "minimize"), 0, attributes)
        attributes, (a, b) = proposal.study_attributes, proposal.settings.values()
        trials.append(Trial(number, proposal.settings, 9, {9: a + b}, "finished", others=(a - b + 4 * b * b,),
                            attributes=proposal.attributes))  # fmt: skip
    means = [sum(trial.settings["b"] for trial in trials[at : at + 20]) / 20 for at in (0, 40)]
    assert means[1] < means[0]


def test_a_notebook_shows_trials_in_the_order_of_the_report(tmp_path):
    """A finished trial stands before one that waits, whose value at an earlier step may be lower."""
    trials = [Trial(0, {}, 3, {3: 0.1}), Trial(1, {}, 9, {3: 0.7, 9: 0.5}, "finished"), Trial(2, {}, 9, {}, "failed"),
              Trial(3, {}, 6, {3: 0.2, 6: 0.9})]  # fmt: skip
    request = request_in(tmp_path)
    report = result(request, trials, SearchView(request, course(4), Full()))
    outcome = SimpleNamespace(request=request, trials=trials, report=report, time_is_over=False)
    page = _result(tmp_path, outcome)._repr_html_()
    assert re.findall(r"<tr><td>(\d)</td>", page) == ["1", "3", "0", "2"]
