"""Decisions of a search, without runs: ASHA against a second implementation, populations, samplers, the journal."""

import importlib.util
import itertools
import random
from dataclasses import replace

import pytest
from mistakes import refusal

from jaxdl.core.errors import ConfigError
from jaxdl.core.kinds import kinds
from jaxdl.platform.search.__main__ import main
from jaxdl.platform.search.config import SearchConfig, objectives_of
from jaxdl.platform.search.samplers import Grid, Sampler
from jaxdl.platform.search.schedulers import ASHA, PBT, Clone, Course, Full, Halving, New, Promote
from jaxdl.platform.search.space import Choices, Number, parse_settings, words_of
from jaxdl.platform.search.trial import Trial, best, best_first, comparable, rank
from jaxdl.report.better_direction import mode_of
from jaxdl.report.compare.curves import Curves
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import Loss

RATE = Number("optimizer.learning_rate", 1e-3, 1.0, log=True)
MOMENTUM = Choices("optimizer.momentum", (0.8, 0.9, 0.95))


def course(trials=20, total=27, direction="maximize", aligned=lambda step: step):
    return Course(trials, total, aligned, direction, (RATE, MOMENTUM), seed=3)


class Bench:
    """Plays a policy with workers that end in a random order, and trials whose metric is a function of number and step.

    `dies(number, step)` says whether a trial fails on its way to a step.
    """

    def __init__(self, policy, value, parallel=2, seed=0, dies=lambda number, step: False):
        self.policy, self.value, self.parallel, self.dies = policy, value, parallel, dies
        self.trials, self.running, self.log, self.draw = [], [], [], random.Random(seed)

    def act(self, action):
        if isinstance(action, New):
            number, target = len(self.trials), action.target or 27
            self.trials.append(Trial(number, {RATE.name: 0.1, MOMENTUM.name: 0.9}, target))
        elif isinstance(action, Promote):
            number = action.number
            assert not self.trials[number].busy
            assert self.trials[number].state == "open"
            self.trials[number] = replace(self.trials[number], target=action.target)
        else:
            number, parent, lost = len(self.trials), self.trials[action.parent], self.trials[action.replaces]
            values = {step: value for step, value in parent.values.items() if step <= action.from_step}
            self.trials.append(Trial(number, action.settings, action.from_step, values, parent=parent.number,
                                     from_step=action.from_step, replaces=lost.number))  # fmt: skip
            if lost.state == "open":
                self.trials[lost.number] = replace(lost, state="replaced")
            return
        self.running.append(number)

    def play(self, most=1000):
        for _ in range(most):
            while len(self.running) < self.parallel and (action := self.policy.next(self.trials)) is not None:
                self.log.append(action)
                self.act(action)
            if not self.running:
                return self
            self.end(self.running.pop(self.draw.randrange(len(self.running))))
        raise AssertionError("it does not end")

    def end(self, number):
        one = self.trials[number]
        if self.dies(number, one.target):
            self.trials[number] = replace(one, state="failed", reason="diverged")
            return
        values = {**one.values, one.target: self.value(number, one.target)}
        self.trials[number] = replace(one, values=values, state="finished" if one.target == 27 else "open")


def promotions_by_hand(trials, rungs, reduction, direction):
    """Every promotion that ASHA's rule allows now, from counts alone: (rung, trial), the highest rung first.

    Written from algorithm 2 of arXiv 1810.05934: of the results at a rung, the best floor(n / reduction).
    """
    sign = 1 if direction == "maximize" else -1
    allowed = []
    for rung, following in reversed(list(itertools.pairwise(rungs))):
        results = {one.number: sign * one.values[rung] for one in trials if rung in one.values}
        worst = sum(one.state == "failed" and one.target == rung for one in trials if rung not in one.values)
        quota = (len(results) + worst) // reduction
        for number, value in results.items():
            above = sum(other > value or (other == value and key < number) for key, other in results.items())
            if above < quota and trials[number].state == "open" and trials[number].target == rung:
                allowed.append((rung, -value, number, following))
    return sorted(allowed, key=lambda one: (-one[0], one[1], one[2]))


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
@pytest.mark.parametrize("seed", range(6))
def test_asha_promotes_as_a_second_implementation_does(direction, seed):
    rungs, reduction = [1, 3, 9, 27], 3
    policy, draw = Halving(rungs, reduction, 30, direction), random.Random(seed)
    noise = [draw.choice([0.1, 0.2, 0.3, 0.4, draw.random()]) for _ in range(30)]  # Some are equal.

    def value(number, step):
        return round(noise[number] + 0.01 * step, 6)

    def dies(number, step):
        return number % 7 == 3 and step == 3

    class Checked:
        def next(self, trials):
            found, allowed = policy.next(trials), promotions_by_hand(trials, rungs, reduction, direction)
            if allowed:
                assert found == Promote(allowed[0][2], allowed[0][3])
            elif len(trials) < 30:
                assert found == New(1)
            elif any(one.busy for one in trials) or any(one.state == "finished" for one in trials):
                assert found is None
            return found

    played = Bench(Checked(), value, parallel=1 + seed, seed=seed, dies=dies).play()
    assert len(played.trials) == 30
    assert any(one.state == "finished" for one in played.trials), "the best trial is trained to the end"
    promoted = [(one.number, one.target) for one in played.log if isinstance(one, Promote)]
    assert len(set(promoted)) == len(promoted), "none twice"


def test_asha_by_hand():
    rungs = [2, 6]
    policy = Halving(rungs, 3, 4, "maximize")
    trials = [Trial(number, {}, 2, {2: value}) for number, value in enumerate([0.5, 0.9])]
    assert policy.next(trials) == New(2), "two of three results: none may be promoted yet"
    trials.append(Trial(2, {}, 2, {2: 0.7}))
    assert policy.next(trials) == Promote(1, 6)
    trials[1] = replace(trials[1], target=6)
    assert policy.next(trials) == New(2)
    trials.append(Trial(3, {}, 2))
    assert policy.next(trials) is None, "all are started, and two train"
    trials[1] = replace(trials[1], values={2: 0.9, 6: 0.95}, state="finished")
    trials[3] = replace(trials[3], values={2: 0.99})
    assert policy.next(trials) == Promote(3, 6), "4 // 3 is one, and trial 3 is the best now"


def test_few_trials_end_with_one_that_is_complete():
    played = Bench(Halving([1, 3, 9, 27], 3, 4, "minimize"), lambda number, step: number).play()
    assert [one.step for one in played.trials] == [27, 1, 1, 1]
    assert best(played.trials, "minimize").number == 0


def test_when_the_complete_one_dies_the_next_best_takes_its_place():
    played = Bench(Halving([9, 27], 3, 4, "minimize"), lambda number, step: number, dies=lambda n, s: (n, s) == (0, 27))
    assert [one.state for one in played.play().trials] == ["failed", "finished", "open", "open"]


def test_rungs_are_steps_at_which_a_run_evaluates_anyway():
    every_4 = course(total=100, aligned=lambda step: min(100, -(-step // 4) * 4))
    assert ASHA().steps(every_4) == [4, 12, 28, 84, 100]
    assert ASHA(reduction=2, min_steps=30).steps(every_4) == [32, 60, 100]
    assert ASHA(rungs=(10, 11, 50)).steps(every_4) == [12, 52, 100]
    for wrong in (ASHA(rungs=(100,)), ASHA(min_steps=200), ASHA(rungs=(0,)), ASHA(rungs=(5,), min_steps=5)):
        with pytest.raises(ConfigError, match="rung"):
            wrong.steps(every_4)


def test_without_a_scheduler_every_trial_is_trained_to_the_end():
    played = Bench(Full().policy(course(5)), lambda number, step: number).play()
    assert played.log == [New(None)] * 5


@pytest.mark.parametrize("parallel", [1, 3, 8])
def test_a_population_replaces_its_worst_by_its_best_whatever_the_order(parallel):
    def value(number, step):
        return number + step / 100

    policy = PBT(interval=9).policy(course(8, aligned=lambda step: step))
    played = Bench(policy, value, parallel, seed=parallel).play()
    clones = [one for one in played.log if isinstance(one, Clone)]
    first, second = ([one for one in clones if one.from_step == step] for step in (9, 18))
    assert [one.replaces for one in first] == [0, 1], "the two worst of eight at step 9"
    assert {one.parent for one in first} <= {6, 7}
    assert [one.replaces for one in second] == [2, 3]
    assert {one.parent for one in second} <= {8, 9}, "copies have their own numbers, and are the best by then"
    members = [one for one in played.trials if one.state == "finished"]
    assert len(members) == 8
    assert all(one.step == 27 for one in members)
    for one in clones:
        assert RATE.low <= one.settings[RATE.name] <= RATE.high
        assert one.settings[MOMENTUM.name] in MOMENTUM.values
    again = Bench(policy, value, parallel=2, seed=99).play()
    assert [one for one in again.log if isinstance(one, Clone)] == clones, "a function of the values, not of the order"


@pytest.mark.parametrize("ended", [True, False])
def test_a_population_grows_by_the_trials_that_are_added(ended):
    """By more --trials, after it has ended and before."""
    policies = [PBT(interval=9).policy(course(trials)) for trials in (4, 6)]
    first = Bench(policies[0], lambda number, step: number)
    if ended:
        first.play()
    else:
        with pytest.raises(AssertionError, match="does not end"):
            first.play(5)
    copies = sum(one.parent is not None for one in first.trials)
    assert copies, "they are no members of their own"
    more = Bench(policies[1], lambda number, step: number)
    more.trials, more.running = list(first.trials), list(first.running)
    more.play()
    assert more.log.count(New(9)) == 2
    assert sum(one.parent is None for one in more.trials) == 6
    assert sum(one.state == "finished" for one in more.trials) == 6


def test_a_grid_goes_on_where_it_stopped_beside_copies():
    settings = parse_settings(["a=1,2,3"])
    trials = [Trial(0, {"a": 1}, 9), Trial(1, {"a": 2}, 9), Trial(2, {"a": 2}, 9, parent=1, from_step=4, replaces=0)]
    assert Grid().propose(settings, trials, ("maximize",), 0, {}).settings == {"a": 3}


def test_a_population_takes_the_same_decision_after_a_kill_in_the_middle():
    policy = PBT(interval=9, quantile=0.5).policy(course(4))
    trials = [Trial(number, {RATE.name: 0.1, MOMENTUM.name: 0.9}, 9, {9: float(number)}) for number in range(4)]
    bench = Bench(policy, lambda number, step: number)
    bench.trials = trials
    first = policy.next(trials)
    assert (first.replaces, first.from_step) == (0, 9)
    bench.act(first)
    second = policy.next(bench.trials)
    assert (second.replaces, second.from_step) == (1, 9)
    bench.act(second)
    assert isinstance(policy.next(bench.trials), Promote)
    recorded_only = [*bench.trials[:1], replace(bench.trials[1], state="open"), *bench.trials[2:]]
    assert isinstance(policy.next(recorded_only), Promote), "the copy of trial 1 is recorded: none is made again"


def test_a_member_that_diverged_is_replaced_and_a_dead_population_ends():
    policy = PBT(interval=9).policy(course(4))
    played = Bench(policy, lambda number, step: number, dies=lambda number, step: number in (1, 2)).play()
    assert sorted(one.replaces for one in played.log if isinstance(one, Clone) and one.from_step == 9) == [1, 2]
    assert sum(one.state == "finished" for one in played.trials) == 4
    dead = Bench(policy, lambda number, step: number, dies=lambda number, step: True).play()
    assert [one.state for one in dead.trials] == ["failed"] * 4


def test_what_is_perturbed_stays_in_its_range():
    draw = random.Random(0)
    whole = Number("x", 1, 8, whole=True)
    assert {round(RATE.perturb(0.1, draw), 9) for _ in range(50)} == {0.08, 0.12}
    assert {RATE.perturb(1.0, draw) for _ in range(50)} == {0.8, 1.0}
    assert {whole.perturb(2, draw) for _ in range(50)} == {1, 3}
    assert {MOMENTUM.perturb(0.8, draw) for _ in range(50)} == {0.8, 0.9}
    drawn = [RATE.sample(draw) for _ in range(400)]
    assert 0.4 < sum(one < 10**-1.5 for one in drawn) / 400 < 0.6, "half of the logarithms are below the middle"


def test_what_varies_is_read():
    found = parse_settings(["optimizer.learning-rate=log:1e-3:1", "optimizer.momentum=0.8,0.9,0.95", "x=sgd, lars"])
    assert found == [RATE, MOMENTUM, Choices("x", ("sgd", "lars"))]
    assert parse_settings(["a=int:1:3", "b=uniform:-1:1"]) == [Number("a", 1, 3, whole=True), Number("b", -1.0, 1.0)]
    settings = {"optimizer.nesterov": False, "optimizer.learning_rate": 0.1, "optimizer": "sgd", "step.ema": True}
    assert words_of(settings) == [
        "--optimizer", "sgd", "--optimizer.no-nesterov", "--optimizer.learning-rate", "0.1", "--step.ema",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["a", "=1,2", "a=", "a=log:1", "a=log:0:1", "a=uniform:2:1", "a=int:0.5:3", "a=1,,2", "a=1,1", "a=log:x:y"],
)
def test_what_cannot_be_read_is_refused(text):
    with pytest.raises(ConfigError, match="--vary"):
        parse_settings([text])


def test_a_grid_has_every_combination_once():
    settings = parse_settings(["a=1,2,3", "b=int:0:1"])
    assert Grid().check(settings) == 6
    trials = []
    for number in range(6):
        proposal = Grid().propose(settings, trials, ("maximize",), 0, {})
        trials.append(Trial(number, proposal.settings, 1))
    assert [tuple(one.settings.values()) for one in trials] == [(a, b) for a in (1, 2, 3) for b in (0, 1)]
    with pytest.raises(ConfigError, match="no list of values"):
        Grid().check([RATE])


NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch: pip install torch")


@pytest.mark.parametrize("name", ["random", "tpe", "qmc", "cmaes", pytest.param("gp", marks=NEEDS_TORCH)])
def test_a_proposal_is_a_function_of_the_journal_and_the_seed(name):
    sampler, trials = kinds(Sampler)[name](), {0: [], 1: []}
    for seed, found in trials.items():
        attributes = {}
        for number in range(14):
            asked = [sampler.propose([RATE, MOMENTUM], found, ("maximize",), seed, attributes) for _ in range(2)]
            assert asked[0] == asked[1]
            attributes, values = asked[0].study_attributes, {1: -abs(asked[0].settings[RATE.name] - 0.1)}
            state = "failed" if number % 5 == 3 else "open"
            found.append(Trial(number, asked[0].settings, 1, values, state, attributes=asked[0].attributes))
    first, second = ({one.settings[RATE.name] for one in found} for found in trials.values())
    assert len(first) > 10
    if name != "qmc":  # Its points are those of --sampler.sequence, whatever the seed.
        assert not first & second, "a seed and the next one have nothing in common"


def test_a_sampler_that_needs_a_package_says_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install torch"):
        kinds(Sampler)["gp"]().check([RATE])


def test_a_missing_package_ends_the_command_before_a_trial(tmp_path, monkeypatch, capsys):
    """Exit code 2, and nothing in the folder."""
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "torch" else find(name, *rest))
    folder = tmp_path / "search"
    options = ["--config", "digits", "--workdir", folder, "--trials", 2, "--vary", "optimizer.learning-rate=log:0.01:1"]
    message = refusal(capsys, *options, "--sampler", "gp", run=main)
    assert message == (
        "error: --sampler gp: it needs the package torch. Install it: pip install torch; or choose another --sampler, "
        "such as tpe."
    )
    assert not folder.exists()


def test_finished_trials_are_compared_whatever_their_lengths():
    """With --scheduler none lengths differ: the one with the most steps need not be the best."""
    long, short, way = (Trial(0, {}, 40, {40: 0.5}, "finished"), Trial(1, {}, 20, {20: 0.9}, "finished"),
                        Trial(2, {}, 60, {50: 0.95}))  # fmt: skip
    trials = [long, short, way]
    assert best(trials, "maximize") == short
    assert best(trials, "minimize") == long
    assert comparable(trials) == [long, short], "those on their way, and failed ones, are not"
    assert [one.number for one in sorted(trials, key=lambda one: rank(one, "maximize"))] == [1, 0, 2]
    failed = replace(long, state="failed")
    assert best([failed, way, replace(way, number=3, values={30: 1.0})], "maximize") == way, "of others the furthest"
    assert best([failed, Trial(1, {}, 3)], "maximize") is None


def loss(outputs, batch):
    return outputs, batch


@pytest.mark.parametrize(
    ("task", "metric", "winner"),
    [
        (Loss(loss, best_metric="accuracy"), None, 3),
        (Loss(loss, best_metric="wer", best_mode="min"), None, 0),
        (Loss(loss, best_metric="wer", best_mode="max"), None, 3),
        (Loss(loss, best_metric="accuracy"), "eval/loss", 0),
        (Loss(loss), None, 0),
    ],
)
def test_who_wins_follows_the_metric_of_the_task(task, metric, winner, tmp_path):
    """In a search, in a population, and where runs are compared; values rise with the number of the trial."""
    experiment = Experiment(task=task)
    config = SearchConfig(metric=metric)
    ((column, direction),) = objectives_of(config, experiment)
    trials = [Trial(number, {RATE.name: 0.1, MOMENTUM.name: 0.9}, 9, {9: 0.1 + number}) for number in range(4)]
    assert best(trials, direction).number == winner
    assert best_first(trials, 9, direction)[0].number == winner
    (clone,) = PBT(interval=9).policy(course(trials=4, direction=direction)).replacements(trials, 9)
    assert (clone.parent, clone.replaces) == (winner, 3 - winner)
    rows = [{"step": number, column: 0.1 + number} for number in range(4)]
    mode = task.known_mode
    for known in (None, (task.best_metric, mode)) if mode_of(task.best_metric) else ((task.best_metric, mode),):
        assert Curves(tmp_path, rows, {}, None, known).best(column) == (0.1 + winner, winner)


def test_a_metric_without_a_direction_is_refused():
    with pytest.raises(ConfigError, match="best_metric = 'wer': whether a higher or a lower value is better"):
        objectives_of(SearchConfig(), Experiment(task=Loss(loss, best_metric="wer")))
    with pytest.raises(ConfigError, match="metric eval/wer: whether a higher value is better is not known"):
        objectives_of(SearchConfig(metric="eval/wer"), Experiment(task=Loss(loss)))
