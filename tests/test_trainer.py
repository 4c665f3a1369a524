"""Whole runs from Python: what they return, write, compile and refuse."""

import contextlib
import errno
import io
import json
import logging
import os
import re
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pandas as pd
import pytest
from orbax.checkpoint.utils import checkpoint_steps
from runs import ONE_DEVICE, TinyPerceptron, tiny_experiment, write_config

import jaxdl
from jaxdl.core.files import CHECKPOINTS_FOLDER, STATUS_FILE, step_dir
from jaxdl.data import eval_batches
from jaxdl.optim import SGD
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.report import Diverged, ReportConfig
from jaxdl.report.lines import format_number
from jaxdl.report.reporter import Reporter
from jaxdl.report.status import read_record
from jaxdl.train import main
from jaxdl.training.checkpoint import Unreadable, reading
from jaxdl.training.evaluation import evaluate, make_eval_step
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.run.signals import StopSignals

FOUR = jax.devices()[:4]
TINY = tiny_experiment(mesh=MeshConfig(replica=2, fsdp=2), report={"every_steps": 5})
PLAIN = TINY.replaced({"report.curves": False, "report.tensorboard": False})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run: `(run, workdir, names of what XLA compiled)`; what it printed is in `workdir`.txt."""
    names = []

    class Listener(logging.Handler):
        def emit(self, record):
            message = record.getMessage()
            if "Finished XLA compilation of" in message:
                names.append(message.split("Finished XLA compilation of ")[1].split(" in ")[0])

    handler, logger = Listener(), logging.getLogger("jax._src.dispatch")
    workdir = tmp_path_factory.mktemp("run")
    logger.addHandler(handler)
    # For all threads: the steps are compiled in one of their own, so that signals are noticed meanwhile.
    jax.config.update("jax_log_compiles", True)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            run = jaxdl.train(TINY, workdir, devices=FOUR)
    finally:
        jax.config.update("jax_log_compiles", False)
        logger.removeHandler(handler)
    workdir.with_suffix(".txt").write_text(printed.getvalue())
    return run, workdir, names


def test_the_train_step_is_compiled_once(finished):
    _, _, names = finished
    assert sum("train_step" in name for name in names) == 1, names
    assert sum("eval_step" in name for name in names) == 1, names


def test_what_a_run_returns(finished):
    run, _, _ = finished
    frame = pd.DataFrame(run.history)
    # Reports every 5 steps, and before each evaluation (every 4) and checkpoint, so that nothing spans one.
    assert frame["step"].tolist() == [4, 4, 8, 8, 12, 12]
    assert frame["epoch"].tolist() == [step / 6 for step in frame["step"]]
    trained = frame.dropna(subset=["train/loss"])
    assert (trained["examples_per_sec"] > 0).all()
    assert run.metrics == {name: frame[f"eval/{name}"].iloc[-1] for name in ("loss", "accuracy")}  # 4 classes
    assert int(run.state.step) == 12
    assert run.plot().axes


def test_what_a_run_prints_on_a_pipe(finished):
    run, workdir, _ = finished
    lines = [
        re.sub(r": \d[\d:.]*( s)?$", ": N s", line) for line in workdir.with_suffix(".txt").read_text().split("\n")
    ]
    first, last = (next(i for i, line in enumerate(lines) if line.startswith(word)) for word in ("step ", "finished "))
    in_order = [
        "starting the devices ...", "devices    4 virtual", "reading the data ...", "data       synthetic",
        "model      tiny_resnet", "length     2 epochs = 12 steps", "making the initial parameters ...",
        f"workdir    {workdir}, new", "compiling ...", "reading data ...",
    ]  # fmt: skip
    found = [next(i for i, line in enumerate(lines) if line.startswith(begin)) for begin in in_order]
    assert found == sorted(found)
    assert found[-1] < first
    metrics = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in metrics] == [f"{step}/12" for step in (4, 4, 8, 8, 12, 12)]
    assert re.fullmatch(
        r"step 4/12  epoch 0\.7  loss \S+  accuracy \S+  grad_norm \S+  lr \S+.*  \S+ examples/s(  eta \S+)?",
        metrics[0],
    )
    assert f"eval/loss {format_number(run.metrics['loss'])}" in metrics[-1]
    end = dict(line.split("  ", 1) for line in lines[last:] if line)
    assert end["finished"] == "step 12 of 12"
    assert end["loss"] == format_number(run.metrics["loss"])
    assert end["curves"] == str(workdir / "curves.png")
    assert end["use it"] == f'jaxdl.restore("{workdir}").predict(images)'
    assert len(end) <= 13
    assert "resume" not in end


def test_what_a_run_leaves_in_its_workdir(finished):
    run, workdir, _ = finished
    assert {path.name for path in workdir.iterdir()} == {
        "checkpoints", "checkpoints.json", "config.json", "confusion.png", "curves.png", "data.json", "examples.json",
        "metrics.jsonl", "mistakes.png", "status.json", "summary.json", "tensorboard",
    }  # fmt: skip
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["mesh"] == {"replica": 2, "fsdp": 2, "tensor": 1}
    assert {"compile", "train", "eval", "checkpoint", "data"} <= set(summary["seconds"])
    assert summary["metrics"] == pytest.approx(run.metrics)
    assert jaxdl.Experiment.from_json((workdir / "config.json").read_text()) == TINY
    assert (workdir / "curves.png").read_bytes().startswith(b"\x89PNG")


def contents(workdir):
    """Every file but TensorBoard's, of which each start makes one."""
    return {
        path: path.read_bytes() for path in workdir.rglob("*") if path.is_file() and "tensorboard" not in path.parts
    }


def test_a_finished_run_started_again_does_nothing(finished, capsys):
    run, workdir, _ = finished
    before = contents(workdir)
    again = jaxdl.train(TINY, workdir, devices=FOUR)
    assert again.metrics == run.metrics
    assert again.summary == run.summary
    assert f"workdir    {workdir}, resumes from step 12\n" in capsys.readouterr().out
    assert contents(workdir) == before


def test_a_signal_while_restoring_changes_nothing(finished, monkeypatch):
    _, workdir, _ = finished
    before = contents(workdir)

    def read(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(reading, "read_items", read)
    with pytest.raises(jaxdl.Interrupted, match="143") as stopped:
        jaxdl.train(TINY, workdir, quiet=True, devices=FOUR)
    assert "nothing changed" in stopped.value.message
    assert contents(workdir) == before


@pytest.mark.parametrize("error", [MemoryError("too little"), OSError(errno.EIO, "no reply")])
def test_what_is_not_damage_moves_no_checkpoint(finished, monkeypatch, error):
    _, workdir, _ = finished
    before = contents(workdir)

    def read(*_, **__):
        raise error

    monkeypatch.setattr(reading, "read_items", read)
    with pytest.raises(Unreadable, match="the disk responds again"):
        jaxdl.train(TINY, workdir, quiet=True, devices=FOUR)
    assert read_record(workdir).reason.exit_code == 75
    kept = [path for path in before if path.name != STATUS_FILE and "failures" not in path.parts]
    after = contents(workdir)
    assert [before[path] for path in kept] == [after[path] for path in kept]
    assert all("failures" in path.parts for path in after.keys() - before.keys())


def test_a_checkpoint_of_another_network_is_refused_and_kept(tmp_path, finished):
    workdir = shutil.copytree(finished[1], tmp_path / "copy")
    other = PLAIN.replaced({"model.norm": "group", "model.norm_span": "replica"})
    (workdir / "config.json").write_text(other.to_json())
    with pytest.raises(jaxdl.ConfigError, match="another network or version"):
        jaxdl.train(other, workdir, quiet=True, devices=FOUR)
    assert step_dir(workdir, 12).is_dir()


@pytest.mark.slow
def test_float16_that_never_takes_a_step_is_no_finished_run():
    # With the scale held so high that every gradient overflows.
    scale = {"kind": "float16", "initial_scale": 2.0**40, "min_scale": 2.0**40, "max_scale": 2.0**40}
    with pytest.raises(Diverged, match="its gradient"):
        jaxdl.train(
            tiny_experiment(model=TinyPerceptron(), mesh=ONE_DEVICE, precision=scale), quiet=True, devices=FOUR[:1]
        )


def test_without_a_workdir_nothing_is_left_on_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = set(threading.enumerate())
    run = jaxdl.train(TINY.replaced({"evaluation": {}, "checkpoint": {}}), quiet=True, devices=FOUR)
    assert run.summary["steps"] == 12
    assert not list(tmp_path.iterdir())
    for thread in {thread for thread in threading.enumerate() if "jaxdl" in thread.name} - threads:
        thread.join(timeout=10)  # One that is at its end may still be there for a moment.
        assert not thread.is_alive(), thread.name


def test_evaluation_covers_every_example_once_on_every_mesh():
    num_test = 37
    experiment = TINY.replaced({"data.num_test": num_test, "evaluation.batch_size": 16})
    found = []
    for mesh, count in ((MeshConfig(fsdp=1), 1), (MeshConfig(replica=4, fsdp=2), 8)):
        plan = make_plan(experiment.replaced({"mesh": mesh}), jax.devices()[:count])
        parts, state = plan.parts, make_initial_state(plan)
        with eval_batches(plan.splits.test, batch_size=16, sharding=batch_sharding(parts.layout.mesh)) as batches:
            found.append(evaluate(parts, make_eval_step(parts), state.params, state.model_state, batches))
    rows = plan.splits.test.batch(np.arange(num_test))
    params, model_state = jax.device_get((state.params, state.model_state))
    logits, _ = parts.network.apply(params, model_state, *parts.task.inputs(rows, parts.data_spec), train=False)
    logits = np.asarray(logits, np.float64)
    log_probability = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected_loss = -log_probability[np.arange(num_test), rows["label"]].mean()
    for metrics in found:
        np.testing.assert_allclose(metrics["loss"], expected_loss, rtol=1e-5)
        assert metrics["accuracy"] == np.mean(logits.argmax(-1) == rows["label"])


@pytest.mark.slow
def test_a_run_that_diverges_stops_and_says_so(tmp_path, capsys):
    changes = {"optimizer": SGD(learning_rate=1e30), "model": TinyPerceptron(), "guard.rollback_after": 3}
    bad = PLAIN.replaced(changes | {"mesh": MeshConfig(fsdp=8)})
    path = write_config(tmp_path, bad.replaced({"checkpoint.every_steps": 100}))
    with pytest.raises(SystemExit) as ended:
        main(["--config", str(path), "--workdir", str(tmp_path / "run")])
    assert ended.value.code == 3
    said = capsys.readouterr().err
    assert re.search(r"error: the training loss is not finite at step \d+ .*learning.rate", said, flags=re.DOTALL)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert None in [row for row in rows if "train/loss" in row][-1].values(), "JSON has no numbers that are not finite"
    assert not checkpoint_steps(tmp_path / "run" / CHECKPOINTS_FOLDER), "a state that is not finite is not saved"


def test_a_signal_in_process_saves_and_the_same_call_goes_on(tmp_path, finished):
    whole, _, _ = finished

    def interrupt(info):
        if info.step == 6:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(jaxdl.Interrupted) as stopped:
        jaxdl.train(PLAIN, tmp_path, quiet=True, devices=FOUR, on_step=[interrupt])
    assert stopped.value.code == 130
    assert "step 6" in stopped.value.message
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handlers are given back"
    interrupted = json.loads((tmp_path / "summary.json").read_text())
    assert interrupted["status"] == "interrupted"
    run = jaxdl.train(PLAIN, tmp_path, quiet=True, devices=FOUR)
    assert run.metrics == whole.metrics
    assert run.summary["seconds"]["train"] > interrupted["seconds"]["train"], "the times of both add up"


def test_a_hook_sees_each_step_and_may_stop_the_run(tmp_path, finished):
    whole, workdir, _ = finished
    seen = {}

    def look(info):
        seen[info.step] = info.metrics()
        assert int(info.state.step) == info.step
        assert not info.skipped
        if info.step == 6:
            info.stop()

    run = jaxdl.train(PLAIN, tmp_path, quiet=True, devices=FOUR, on_step=[look])
    assert list(seen) == [1, 2, 3, 4, 5, 6]
    assert (run.summary["status"], run.summary["steps"]) == ("stopped", 6)
    row = next(row for row in map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines()) if row["step"] == 4)
    # Those of the last step are reported as they are; the loss is that of all steps since the last report.
    assert seen[4]["grad_norm"] == row["train/grad_norm"]
    assert np.mean([seen[step]["loss"] for step in range(1, 5)]) == pytest.approx(row["train/loss"], rel=1e-6)
    again = jaxdl.train(PLAIN, tmp_path, quiet=True, devices=FOUR)
    assert again.metrics == whole.metrics


def test_a_second_signal_is_not_held_back():
    with StopSignals():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_a_profile_on_request(tmp_path):
    report = {"profile_start_step": 2, "profile_steps": 1, "curves": False, "tensorboard": False}
    jaxdl.train(TINY.replaced({"report": report}), tmp_path, quiet=True, devices=FOUR)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_a_profile_that_is_due_inside_a_merge_beside_steps(tmp_path, monkeypatch):
    """Steps 5 and 6 are one program, so the profile begins after them."""
    counter, told = SimpleNamespace(step=0), []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: told.append(("starts", counter.step)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: told.append(("ends", counter.step)))
    reporter = SimpleNamespace(
        _counter=counter, _step_before=None, _profile_end=None, _folder=tmp_path, note=lambda text: None,
        _config=ReportConfig(profile_start_step=5, profile_steps=1),
    )  # fmt: skip
    for counter.step in (3, 4, 6, 7, 8):
        Reporter.profile(reporter, {})
    assert told == [("starts", 6), ("ends", 7)]


def test_the_public_face():
    assert callable(jaxdl.train)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        jaxdl.nothing_like_it  # noqa: B018
    assert set(jaxdl.__all__) <= set(dir(jaxdl))
    run = jaxdl.train(TINY, quiet=True, devices=FOUR)
    assert run.workdir is None
