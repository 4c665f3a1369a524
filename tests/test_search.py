"""Searches of real runs: in this process for what they train, as processes for what a kill leaves."""

import json
import re
import shutil
import time

import jax
import pytest
from runs import Started, TinyPerceptron, measured, rows, tiny_experiment, write_config

import jaxdl
from jaxdl.core.errors import ConfigError
from jaxdl.core.files import CHECKPOINTS_FOLDER, step_dir
from jaxdl.optim import SGD
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.platform.search import command
from jaxdl.platform.search.engines import Engine, shares
from jaxdl.platform.search.metrics import value_at
from jaxdl.platform.search.workdirs import copy_workdir
from jaxdl.report import Diverged
from jaxdl.training.command import parse_command
from jaxdl.training.experiment import read_experiment
from jaxdl.training.run.result import Interrupted

EXPERIMENT = tiny_experiment(
    model=TinyPerceptron(),
    mesh=MeshConfig(replica=1, fsdp=1, cpu_devices=8),
    optimizer=SGD(learning_rate=0.1, momentum=0.9),
    evaluation={"every_steps": 2},
    checkpoint={"every_steps": 100},
    steps=8,
)
RATES = "optimizer.learning_rate=0.01,0.02,0.05,0.1,0.2,0.4"


class Here(Engine, kind="here_for_tests"):
    """Trains in this process, so that programs are shared; `tests` breaks or stops trials on their way."""

    def open(self, parallel, devices_per_trial):
        return InThisProcess(parallel)


class InThisProcess:
    """A job trains when it is asked whether it has ended."""

    outlive = False
    started = []
    before = staticmethod(lambda number, words: None)
    """Called before a job trains; its result, unless None, is the exit code instead."""

    def __init__(self, capacity):
        self.capacity, self.jobs = capacity, []

    def start(self, job):
        self.jobs.append(job)

    def poll(self):
        codes = {}
        for job in [self.jobs.pop()] if self.jobs else []:
            words = list(job.command[3:])
            self.started.append((job.number, words))
            codes[job.number] = code = self.before(job.number, words)
            if code is None:
                codes[job.number] = self.train(words, job.log)
        return codes

    def train(self, words, log):
        log.parent.mkdir(exist_ok=True)
        try:
            given = parse_command(words)
            options = {"max_steps": given.max_steps, "may_change": given.may_change, "quiet": True}
            jaxdl.train(given.experiment, given.workdir, devices=jaxdl_devices(), **options)
        except (Diverged, ConfigError) as error:
            log.write_text(f"error: {error}\n")
            return 3 if isinstance(error, Diverged) else 2
        except Interrupted as stopped:
            return int(stopped.code)
        return 0

    def stop(self):
        self.jobs.clear()

    def close(self):
        self.jobs.clear()


def jaxdl_devices():
    return jax.devices()[:1]


@pytest.fixture
def drawn():
    """The plots of the report are drawn, which takes as long as a trial."""


@pytest.fixture(autouse=True)
def fresh(request, monkeypatch, on_command_line):
    if "drawn" not in request.fixturenames:
        for plot in ("history", "curves", "slices", "parallel", "importances"):
            monkeypatch.setattr(f"jaxdl.platform.search.plots.{plot}", lambda *args: None)
    monkeypatch.setattr("jaxdl.platform.search.attempts.pause_after", lambda *args: 0.0)
    monkeypatch.setattr(InThisProcess, "started", [])
    monkeypatch.setattr(InThisProcess, "before", staticmethod(lambda number, words: None))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("config"), EXPERIMENT)


def search(config, workdir, *words, engine="here_for_tests", capsys=None):
    line = ["--config", str(config), "--workdir", str(workdir), "--json"]
    line += [] if "--metric" in words else ["--metric", "evaluation/loss"]
    signum = command.run([*line, "--engine", engine, *words], "search")
    assert signum is None
    return json.loads((workdir / "result.json").read_text())


@pytest.mark.slow
def test_a_promoted_trial_is_bit_equal_to_a_run_that_never_stopped(config, tmp_path, drawn):
    asha = ["--vary", RATES, "--trials", "4", "--scheduler.min-steps", "2", "--scheduler.reduction", "2"]
    found = search(config, tmp_path / "search", *asha, "--parallel", "2")
    assert found["stops"] == [2, 4, 8]
    assert found["num_trials"] == 4
    assert found["num_failed"] == 0
    top = found["best"]
    assert top["step"] == 8
    starts = [words for number, words in InThisProcess.started if number == top["number"]]
    assert [words[words.index("--max-steps") + 1] for words in starts if "--max-steps" in words] == ["2", "4"]

    straight = parse_command(top["command"].split()[3:]).experiment
    jaxdl.train(straight, tmp_path / "straight", devices=jaxdl_devices(), quiet=True)
    stopped, never = (timeless(measured(path)) for path in (tmp_path / "search/trials" / f"{top['number']:04d}",
                                                            tmp_path / "straight"))  # fmt: skip
    assert stopped == never, "every row of the history, training and evaluation"
    assert top["value"] == never[-1]["eval/loss"]
    longest = max(trial["step"] for trial in found["trials"])
    assert min(one["value"] for one in found["trials"] if one["step"] == longest) == top["value"]
    trained = sum(one["step"] for one in found["trials"])
    assert found["trained_steps"] == trained < 4 * 8

    page = (tmp_path / "search" / "report.md").read_text()
    assert top["command"] in page
    for picture in ("history", "curves", "slices", "parallel"):
        assert (tmp_path / "search" / f"{picture}.png").read_bytes().startswith(b"\x89PNG")

    InThisProcess.started.clear()
    assert search(config, tmp_path / "search", *asha, "--parallel", "1") == found, "nothing is left to do"
    assert not InThisProcess.started


def timeless(found):
    """Rows without what depends on the clock."""
    clock = re.compile(r"seconds/|.*_per_sec|eta_sec|.*memory")
    return [{name: value for name, value in row.items() if not clock.match(name)} for row in found]


def test_a_search_of_another_kind_in_the_folder_is_refused_and_more_trials_are_not(config, tmp_path):
    words = ["--vary", "optimizer.learning_rate=0.1,0.2", "--sampler", "grid", "--scheduler", "none", "--steps", "2"]
    assert search(config, tmp_path, *words, "--trials", "1")["num_trials"] == 1
    assert search(config, tmp_path, *words)["num_trials"] == 2, "the rest of the grid"
    assert [one["settings"]["optimizer.learning_rate"] for one in result_of(tmp_path)["trials"]] == [0.1, 0.2]
    for changed in (["--vary", "optimizer.momentum=0.8"], ["--steps", "4"], ["--sampler", "random", "--trials", "2"]):
        with pytest.raises(ConfigError, match="belongs to another search"):
            search(config, tmp_path, *words, *changed)
    with pytest.raises(ConfigError, match="grid has 2"):
        search(config, tmp_path / "new", *words, "--trials", "3")


@pytest.mark.slow
def test_a_search_and_a_run_do_not_share_a_folder(config, tiny_run, tmp_path):
    words = ["--vary", RATES, "--sampler", "grid", "--scheduler", "none"]
    before = sorted(path.name for path in tiny_run.workdir.iterdir())
    with pytest.raises(ConfigError, match=r"a run is in it \(status.json, config.json"):
        search(config, tiny_run.workdir, *words)
    assert sorted(path.name for path in tiny_run.workdir.iterdir()) == before
    folder = tmp_path / "search"
    folder.mkdir()
    (folder / "search.json").write_text("{}")
    with pytest.raises(ConfigError, match="it is the folder of a search"):
        jaxdl.train(EXPERIMENT, folder, devices=jaxdl_devices(), quiet=True)
    assert [path.name for path in folder.iterdir()] == ["search.json"]


def result_of(workdir):
    return json.loads((workdir / "result.json").read_text())


def test_failures_are_recorded_and_end_no_search(config, tmp_path, monkeypatch):
    tries = []

    def before(number, words):
        tries.append(number)
        if number == 1:
            return -9
        return 3 if number == 2 else 143 if tries.count(0) == 1 and number == 0 else None

    monkeypatch.setattr(InThisProcess, "before", staticmethod(before))
    words = ["--vary", "optimizer.learning_rate=0.1,0.2,0.3,-1e30", "--scheduler", "none", "--steps", "2"]
    with pytest.raises(ConfigError, match="learning-rate"):  # A value that no run can have is found before.
        search(config, tmp_path / "mistake", *words, "--trials", "4", "--sampler", "grid")
    words[1] = "optimizer.learning_rate=0.1,0.2,0.3"
    found = search(config, tmp_path / "search", *words, "--sampler", "grid", "--retries", "2")
    assert [one["state"] for one in found["trials"]] == ["finished", "failed", "failed"]
    assert tries.count(0) == 2
    assert tries.count(1) == 3
    assert tries.count(2) == 1
    assert "exit code -9, 2 times started again" in found["trials"][1]["reason"]
    assert found["trials"][2]["reason"].startswith("diverged")
    assert found["best"]["number"] == 0
    monkeypatch.setattr(InThisProcess, "before", staticmethod(lambda number, words: 3))
    with pytest.raises(ConfigError, match="all 3 trials failed"):
        search(config, tmp_path / "dead", *words, "--sampler", "grid")


def test_a_metric_that_no_run_has_ends_the_search_and_can_be_corrected(config, tmp_path):
    words = ["--vary", "optimizer.learning_rate=0.1,0.2", "--sampler", "grid", "--scheduler", "none", "--steps", "2"]
    with pytest.raises(ConfigError, match=r"--metric eval/los: .* of its metrics.*: eval/accuracy, eval/loss"):
        search(config, tmp_path, *words, "--metric", "evaluation/los", "--direction", "minimize")
    assert [number for number, _ in InThisProcess.started] == [0], "no other trial trains for it"
    with pytest.raises(ConfigError, match=r"direction: .*minimize.* -> .*maximize"):
        search(config, tmp_path, *words, "--direction", "maximize")
    found = search(config, tmp_path, *words)
    assert [(one["state"], one["step"]) for one in found["trials"]] == [("finished", 2)] * 2
    assert [row["step"] for row in measured(tmp_path / "trials/0000") if "eval/loss" in row] == [2], "trained once"
    with pytest.raises(ConfigError, match="metric: "):
        search(config, tmp_path, *words, "--metric", "evaluation/accuracy", "--direction", "minimize")
    with pytest.raises(ConfigError, match="Give --direction too"):
        search(config, tmp_path / "b", *words, "--metric", "evaluation/acuracy")


@pytest.mark.slow
def test_a_population_copies_checkpoints_and_changes_rates(config, tmp_path, monkeypatch):
    """Also where it is killed while a copy is recorded and not made."""
    words = ["--vary", "optimizer.learning_rate=log:0.001:1", "--trials", "4", "--scheduler", "pbt"]
    words += ["--scheduler.interval", "4", "--parallel", "4"]
    with monkeypatch.context() as patched:
        patched.setattr("jaxdl.platform.search.driver.copy_workdir", lambda *args: os_kill())
        with pytest.raises(KeyboardInterrupt):
            search(config, tmp_path, *words)
    found = search(config, tmp_path, *words)
    assert found["num_trials"] == 5, "four members, and one copy of four // 4"
    copy = found["trials"][4]
    parent, (lost,) = found["trials"][copy["parent"]], [one for one in found["trials"] if one["state"] == "replaced"]
    at_4 = {one["number"]: one["values"]["4"] for one in found["trials"][:4]}
    assert (min(at_4, key=at_4.get), max(at_4, key=at_4.get)) == (parent["number"], lost["number"])
    assert copy["settings"] != parent["settings"]
    own, others = (timeless(measured(tmp_path / "trials" / f"{number:04d}")) for number in (4, parent["number"]))
    assert [row for row in own if row["step"] <= 4] == [row for row in others if row["step"] <= 4]
    (event,) = [row for row in rows(tmp_path / "trials/0004") if row.get("kind") == "settings"]
    assert event["step"] == 4
    rate = read_experiment(tmp_path / "trials/0004").optimizer.learning_rate
    assert rate == copy["settings"]["optimizer.learning_rate"]
    assert found["trained_steps"] == 4 * 8


def os_kill():
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_copy_is_whole_or_not_there(tiny_run, tmp_path):
    source = tmp_path / "0000"
    shutil.copytree(tiny_run.workdir, source)
    assert not copy_workdir(source, tmp_path / "0001", 3), "there is no checkpoint of step 3"
    (tmp_path / ".0001.tmp" / "left").mkdir(parents=True)
    assert copy_workdir(source, tmp_path / "0001", 2)
    assert [path.name for path in (tmp_path / "0001" / CHECKPOINTS_FOLDER).iterdir()] == [step_dir(source, 2).name]
    assert not (tmp_path / ".0001.tmp").exists()
    assert not (tmp_path / "0001" / "left").exists()
    assert value_at(source, "eval/accuracy", 4)[0] == tiny_run.metrics["accuracy"]
    assert value_at(source, "num_params", 4)[0] == sum(x.size for x in jax.tree.leaves(tiny_run.state.params))


def test_gpus_are_divided():
    assert shares([], 2, None) == [{}, {}]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in shares(list("0123"), 2, None)] == ["0,1", "2,3"]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in shares(list("4567"), 3, 1)] == ["4", "5", "6"]
    for gpus, parallel, each in (("01", 3, None), ("0123", 3, 2), ("", 1, 1)):
        with pytest.raises(ConfigError, match="GPUs"):
            shares(list(gpus), parallel, each)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing varies"),
        (["--vary", "optimizer.learning_rats=1,2"], "no such option"),
        (["--vary", "batch_size=8,16"], "changes how many steps"),
        (["--vary", "seed=1,2", "--scheduler", "pbt"], "cannot change when a run resumes"),
        (["--vary", RATES], "--trials: how many"),
        (["--vary", RATES, "--trials", "2", "--max-steps", "3"], "a search does not take it"),
        (["--vary", RATES, "--trials", "2", "--scheduler.rungs", "9"], "a rung at step 9"),
        (["--vary", RATES, "--trials", "2", "--schedule.warmup-steps", "9"], "more warm-up than steps"),
        (["--vary", "schedule.warmup_steps=1,9", "--trials", "2"], "more warm-up than steps"),
        (["--vary", RATES, "--trials", "2", "--exchange", "topk", "--exchange.dense-warmup-steps", "8"], "not shorter"),
        (["--vary", "steps=2,8", "--trials", "2", "--scheduler", "none", "--schedule.warmup-steps", "4"], "has 2"),
        (["--vary", RATES, "--trials", "2", "--sampler", "tpee"], "Did you mean tpe"),
        (["--vary", RATES, "--trials", "2", "--devices-per-trial", "1", "--engine", "local"], "no GPUs here"),
    ],
)
def test_mistakes_are_one_message_and_leave_no_trial(config, tmp_path, words, message):
    with pytest.raises(ConfigError, match=message):
        search(config, tmp_path / "search", *words)
    assert not (tmp_path / "search" / "trials").exists()


def test_a_full_disk_is_one_message(config, tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxdl.platform.search.journal.Journal.add", full)
    with pytest.raises(
        ConfigError, match=r"No space left on device\. When that is put right, the same command goes on"
    ):
        search(config, tmp_path, "--vary", RATES, "--trials", "2")


@pytest.mark.slow
def test_a_search_that_is_killed_with_its_trial_goes_on(config, tmp_path):
    line = ["--config", str(config), "--workdir", str(tmp_path), "--metric", "evaluation/loss", "--vary", RATES]
    line += ["--trials", "1", "--scheduler", "none", "--sampler", "random", "--mesh.cpu-devices", "1"]
    line += ["--steps", "40", "--checkpoint.every-steps", "4"]
    deadline, trial = time.monotonic() + 300, tmp_path / "trials/0000"

    def pid_of_trial(search):
        """The process that trains the trial, when it is past its first step."""
        lease, metrics = trial / "lease.json", trial / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size and pid_in(lease)):
            assert time.monotonic() < deadline
            assert search.poll() is None
            time.sleep(0.02)
        return pid_in(lease)

    first = Started("-m", "jaxdl.search", *line)
    its_trial = pid_of_trial(first)
    first.kill()
    first.communicate()
    while running(its_trial):
        assert time.monotonic() < deadline, "trials end with their search"
        time.sleep(0.05)
    assert len(rows(trial)) < 40, "it was killed on its way"
    second = Started("-m", "jaxdl.search", *line, "--json")
    out, err = second.communicate(timeout=400)
    assert second.returncode == 0, err
    found = json.loads(out)
    assert [(one["number"], one["step"], one["state"]) for one in found["trials"]] == [(0, 40, "finished")]
    assert [path.name for path in (tmp_path / "trials").iterdir()] == ["0000"]
    assert found["num_failed"] == 0
    steps = [row["step"] for row in measured(trial) if "eval/loss" in row]
    assert steps == sorted(set(steps)), "no evaluation is there twice"
    assert steps[-1] == 40


def pid_in(lease):
    """The process that a lease names, or None while it is written."""
    try:
        return json.loads(lease.read_text())["pid"]
    except (OSError, ValueError):
        return None


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
def test_a_search_from_python_goes_on_and_restores_its_best(tmp_path):
    vary = {
        "optimizer.learning_rate": [0.02, 0.1],
        "optimizer": {"sgd": {"optimizer.momentum": [0.5, 0.9]}, "lars": {}},
    }
    shared = {"engine": "here_for_tests", "sampler": "grid", "scheduler": "none", "metric": "evaluation/loss"}
    found = jaxdl.search(EXPERIMENT, vary, tmp_path / "search", trials=2, quiet=True, **shared)
    assert [trial.number for trial in found.trials] == [0, 1]
    found = jaxdl.search(EXPERIMENT, vary, tmp_path / "search", quiet=True, **shared)
    assert len(InThisProcess.started) == len(found.trials) == 6, "none is trained twice"
    assert found.best.value == min(trial.value for trial in found.trials)
    frame = found.frame()
    assert frame.loc[found.best.number, "value"] == found.best.value
    assert frame["optimizer.momentum"].isna().sum() == 2, "LARS has those of the experiment"
    assert found.best.restore().evaluate()["loss"] == pytest.approx(found.best.value, rel=1e-6)
    assert len(found.study().trials) == 6
    with pytest.raises(ConfigError, match="no such setting"):
        jaxdl.search(EXPERIMENT, vary, tmp_path / "other", trails=2)
    assert not (tmp_path / "other").exists()
