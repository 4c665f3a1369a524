"""What runs beside Spark, without it: the files of an executor, processes and their ends, fitting, scoring."""

import contextlib
import dataclasses
import importlib.util
import signal
import threading
import time

import pyarrow
import pyarrow.parquet as parquet
import pytest
from runs import ROOT, Started, wait_for

import jaxdl.platform.spark
from jaxdl.core.config import ConfigError
from jaxdl.data import TFDS, Digits, LabelledTexts, ParquetImages, ParquetPhotos, Photos, Table, Tabular
from jaxdl.platform.spark.fitting import (
    check_overrides,
    check_workdir,
    data_of,
    metrics_of,
    write_experiment,
)
from jaxdl.platform.spark.processes import (
    Job,
    Outcome,
    Place,
    environment_of,
    failure_message,
    main_arguments,
    reason_of,
    run_process,
)
from jaxdl.platform.spark.rows import LABEL, WEIGHT, Columns, PartitionWriter, digest_of
from jaxdl.platform.spark.stream import Ended, Stream
from jaxdl.training.experiment import load

SECRET = "0123456789abcdef"
NAMES = Columns(("number",), "class", "mine", written=("x",))


def batch(x, labels, held=None):
    held = [False] * len(x) if held is None else held
    return pyarrow.RecordBatch.from_pydict({"c0": x, "c1": labels, "c2": held})


def job(*arguments, stream=None, **changes):
    values = {"call": b"", "num_processes": 1, "use_gpu": False, "driver": stream.address if stream else ""}
    values |= {"secret": SECRET, "token": "t" * 16, "grace_sec": 20.0}
    return Job(arguments=arguments, **(values | changes))


def place(process=0, **changes):
    return Place(**({"process": process, "host": "here", "num_here": 1, "coordinator": "here:1"} | changes))


# Rows


def test_a_run_that_stops_as_a_whole_has_no_failure():
    """One process was told to save, and the others stopped with it, perhaps before they were told."""
    with Stream(3, "127.0.0.1", SECRET) as stream:
        stream.ended += [Ended(0, 143, False, ()), Ended(1, 143, True, ())]
        assert stream.failure is None
        assert [one.process for one in stream.stopped] == [0, 1]
        stream.ended.append(Ended(2, 1, False, ("lost",)))
        assert stream.failure.process == 2
        stream.ended[1:2] = []
        assert stream.failure.process == 0


def test_row_groups_have_one_size_and_keep_the_order(tmp_path):
    sizes, first, batches = [7, 1, 20, 5], 0, []
    for size in sizes:
        rows = range(first, first + size)
        batches.append(batch(list(rows), [float(x % 3) for x in rows], [x % 4 == 0 for x in rows]))
        first += size
    written = PartitionWriter(tmp_path, 3, 6, NAMES).write(iter([*batches, batch([], [])]))
    assert [(one.split, one.file) for one in written] == [
        ("train", "train-00003.parquet"),
        ("test", "test-00003.parquet"),
    ]
    for one, wanted in zip(written, ([x for x in range(33) if x % 4], range(0, 33, 4)), strict=True):
        file = parquet.ParquetFile(tmp_path / one.file)
        assert file.read().to_pydict() == {"x": list(wanted), LABEL: [x % 3 for x in wanted]}
        groups = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        assert set(groups[:-1]) <= {6}
        assert 0 < groups[-1] <= 6
        assert (one.num_rows, one.num_classes) == (len(wanted), 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test-00003.parquet", "train-00003.parquet"]


def test_the_digest_is_of_rows_whatever_their_order():
    rows = pyarrow.RecordBatch.from_pydict({"x": [b"a", b"b", b"c"], LABEL: [0, 1, 2]})
    whole = digest_of(rows)
    assert digest_of(rows.take(pyarrow.array([2, 0, 1]))) == whole
    assert (digest_of(rows.slice(0, 1)) + digest_of(rows.slice(1))) % 2**64 == whole
    swapped = pyarrow.RecordBatch.from_pydict({"x": [b"b", b"a", b"c"], LABEL: [0, 1, 2]})
    assert digest_of(swapped) != whole


@pytest.mark.parametrize(
    ("x", "labels", "held", "problem"),
    [
        ([1, None], [0.0, 1.0], None, "column 'number': a row has null"),
        ([1, 2], [0.0, 1.0], [True, None], "column 'mine': a row has null"),
        ([1, 2], [0.0, None], None, "labelCol: the label 'class' is null"),
        ([1, 2], [0.0, 1.5], None, r"labelCol: the label 'class' is 1\.5 in a row\. Labels are"),
        ([1, 2**24 + 1], [0.0, 1.0], None, r"featuresCol: column 'number' has the integer 16777217 in a row; .*Scale"),
    ],
)
def test_bad_rows_leave_no_file(tmp_path, x, labels, held, problem):
    with pytest.raises(ConfigError, match=problem):
        PartitionWriter(tmp_path, 0, 10, NAMES).write(iter([batch([1], [0.0]), batch(x, labels, held)]))
    assert not [*tmp_path.iterdir()]


def rows_of(columns, *arrays, folder):
    writer = PartitionWriter(folder, 0, 10, columns)
    batch = pyarrow.RecordBatch.from_arrays([pyarrow.array(x) for x in arrays], [f"c{i}" for i in range(len(arrays))])
    files = writer.write(iter([batch]))
    return [parquet.read_table(folder / file.file).to_pydict() for file in files], writer.left_out


def test_rows_that_are_not_used_are_counted_by_reason(tmp_path):
    """Each row once, under the first of its reasons; with "error" the first such row is a message."""
    nan = float("nan")
    columns = Columns(("v", "n"), "class", "held", ("v", "n"), weight="w", skips=True)
    arrays = ([[1.0, 2.0], None, [nan, 1.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 0.0]],
              [1, 2, 3, None, 5, 6, 7], [0.0, 1.0, 0.0, 1.0, nan, 1.0, 1.0],
              [1.0, 1.0, 1.0, 1.0, 1.0, None, 2.0], [False] * 7)  # fmt: skip
    rows, left_out = rows_of(columns, *arrays, folder=tmp_path)
    assert rows == [{"v": [[1.0, 2.0], [9.0, 0.0]], "n": [1, 7], LABEL: [0, 1], WEIGHT: [1.0, 2.0]}]
    assert left_out == {
        "null, NaN or infinity in 'v'": 2,
        "null, NaN or infinity in 'n'": 1,
        "no label in 'class'": 1,
        "no weight in 'w'": 1,
    }
    texts = Columns(("text",), "class", "held", ("text",), form="texts", skips=True)
    rows, left_out = rows_of(texts, ["a", None, " \n", "b"], ["x", "y", "x", None], [False] * 4, folder=tmp_path)
    assert (rows, left_out) == ([{"text": ["a"], LABEL: ["x"]}], {"no text in 'text'": 2, "no label in 'class'": 1})
    strict = dataclasses.replace(columns, skips=False)
    for place, problem in ((1, "column 'v': a row has null"), (5, "the weight 'w' is missing")):
        one = [array[place : place + 1] for array in arrays]
        with pytest.raises(ConfigError, match=problem):
            rows_of(strict, *one, folder=tmp_path)
    number = dataclasses.replace(strict, predicts_number=True, weight="", form="table")
    with pytest.raises(ConfigError, match=r"labelCol: the label 'class' is null or not finite"):
        rows_of(number, *(arrays[i][4:5] for i in (0, 1, 2, 4)), folder=tmp_path)


def test_a_folder_that_executors_do_not_have(tmp_path):
    with pytest.raises(ConfigError, match=r"the executor on \S+ cannot write there.*driver and all executors share"):
        PartitionWriter(tmp_path / "gone", 0, 10, NAMES).write(iter([batch([1], [0.0])]))


# Processes


def test_the_environment_that_jaxdl_reads():
    given = {"PATH": "/bin", "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "tpu", "CUDA_VISIBLE_DEVICES": "9"}
    one = environment_of(job(), place(), given)
    assert not [name for name in one if name.startswith(("JAX_NUM", "JAX_PROCESS", "JAX_COORD"))]
    assert (one["JAX_PLATFORMS"], one["PATH"]) == ("cpu", "/bin")
    two = environment_of(job(num_processes=2, use_gpu=True), place(1, num_here=2, gpus=("2", "3")), given)
    assert {name: two[name] for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")} == {
        "JAX_COORDINATOR_ADDRESS": "here:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1",
    }  # fmt: skip
    assert (two["CUDA_VISIBLE_DEVICES"], two["JAXDL_PROCESSES_OF_HOST"], two["JAXDL_HOST"]) == ("2,3", "2", "here/1")
    assert "JAX_PLATFORMS" not in two
    assert "JAX_NUM_CPU_DEVICES" not in two


def test_scripts_and_modules():
    assert main_arguments("train.py", ["--lr", 0.1]) == ("train.py", "--lr", "0.1")
    assert main_arguments("/jobs/train", []) == ("/jobs/train",)
    assert main_arguments("jaxdl.train", ["--x"]) == ("-m", "jaxdl.train", "--x")
    with pytest.raises(ConfigError, match="neither a script"):
        main_arguments("train me", [])


def test_output_and_exit_code_come_to_the_driver(capsys):
    code = "import os, sys; print('hello'); print('JAXDL_SPARK_SECRET' in os.environ); "
    code += "print('bad luck', file=sys.stderr); sys.exit(3)"
    with Stream(2, "127.0.0.1", SECRET) as stream:
        outcome = run_process(job("-c", code, stream=stream, num_processes=2), place(1))
        deadline = time.monotonic() + 20
        while not stream.ended:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert (outcome.process, outcome.code, outcome.told, outcome.end, outcome.is_final) == (
        1,
        3,
        False,
        ("bad luck",),
        True,
    )
    out, err = capsys.readouterr()
    assert out.splitlines() == ["process1 | hello", "process1 | False"]
    assert "process1 | bad luck" in err
    assert stream.failure is not None
    assert failure_message(outcome, 2).splitlines() == [
        "process 1 of 2 ended with exit code 3 (training diverged); the end of its stderr:",
        "  bad luck",
    ]


def test_a_user_error_of_one_ends_the_others():
    """Exit code 2 of a process is final: the others are told to save, which they need not answer for."""
    wait = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); time.sleep(120)"
    fail = "import time; time.sleep(2); raise SystemExit(2)"
    found = {}
    with Stream(2, "127.0.0.1", SECRET) as stream:

        def run(number, code):
            found[number] = run_process(job("-c", code, stream=stream, num_processes=2), place(number))

        threads = [threading.Thread(target=run, args=one) for one in ((0, wait), (1, fail))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert stream.failure.process == 1
    assert (found[0].code, found[0].told, found[0].is_final) == (143, True, True)
    assert (found[1].code, found[1].told) == (2, False)


def test_a_stranger_is_not_listened_to(capsys):
    with Stream(1, "127.0.0.1", "another secret") as stream:
        outcome = run_process(job("-c", "print('hello')", stream=stream), place())
    assert outcome.code == 0
    assert not stream.ended
    assert "process0 | hello" not in capsys.readouterr().out


def test_the_reason_in_an_error_of_spark():
    text = "An error occurred while calling o1.collect.\n: org.apache.spark.SparkException: Job 3 cancelled\n\tat org."
    assert reason_of(text) == "Job 3 cancelled"
    assert reason_of("[ARROW] no") == "[ARROW] no"


def test_what_is_retried():
    finals = {code: Outcome(0, code, False, ()).is_final for code in (0, 1, 2, 3, 4, 75, 137)}
    assert finals == {0: True, 1: False, 2: True, 3: True, 4: True, 75: False, 137: False}
    assert Outcome(0, 143, True, ()).is_final


def test_a_killed_task_lets_its_process_save(tmp_path):
    """Spark kills the Python process of a task by SIGKILL; the process beside it gets SIGTERM, and its time."""
    script = tmp_path / "saves.py"
    script.write_text(
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    print('saving', flush=True); time.sleep(1)\n"
        "    pathlib.Path(sys.argv[1], 'saved').write_text('yes'); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "pathlib.Path(sys.argv[1], 'began').write_text('yes'); time.sleep(120)\n"
    )
    task = (
        "from jaxdl.platform.spark.processes import Job, Place, run_process\n"
        f"job = Job(({str(script)!r}, {str(tmp_path)!r}), b'', 1, False, '', {SECRET!r}, 't' * 16, 20.0)\n"
        "run_process(job, Place(0, 'here', 1, 'here:1'))\n"
    )
    process = Started("-c", task, PYTHONPATH=str(ROOT))
    wait_for(process, (tmp_path / "began").exists)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while not (tmp_path / "saved").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_that_does_not_end_is_killed():
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(120)"
    with Stream(1, "127.0.0.1", SECRET) as stream:
        timer = threading.Timer(3, stream.stop)
        timer.start()
        outcome = run_process(job("-c", deaf, stream=stream, grace_sec=0.5), place())
    assert (outcome.code, outcome.told) == (128 + signal.SIGKILL, True)


# Fitting


def test_the_data_follow_the_config():
    files = {"train": ["a"], "test": ["b"], "num_classes": 3}
    images = data_of(Digits(), "images", features=["image"], **files)
    assert images == ParquetImages(train=("a",), test=("b",), num_classes=3)
    own = ParquetImages(test_fraction=0.4, channels=1)
    assert data_of(own, "images", features=["image"], **files).channels == 1
    weighted = data_of(Tabular(), "numbers", features=["p"], **files, weight="w")
    assert (weighted.weight, weighted.features) == ("w", ("p",))
    number = data_of(Table(numbers=("p",)), "table", features=["p"], **files, weight="w", number=True)
    assert number == Table(file=("a",), test=("b",), weight="w", target="number", numbers=("p",))
    assert data_of(Table(weight="v"), "table", features=["p"], **files) == Table(
        file=("a",), test=("b",), target="classes"
    )
    texts = data_of(LabelledTexts(length=9), "texts", features=["one", "two"], **files)
    assert texts == LabelledTexts(train=("a",), test=("b",), text="one", text_pair="two", length=9)
    photos = Photos(size=64)
    cropped = data_of(TFDS(name="imagenet2012", photos=photos), "images", features=["image"], **files)
    assert cropped == ParquetPhotos(train=("a",), test=("b",), num_classes=3, photos=photos)
    table = data_of(Tabular(normalize=False), "numbers", features=["p", "q"], **files)
    assert table == Tabular(train=("a",), test=("b",), num_classes=3, features=("p", "q"), normalize=False)


def test_a_workdir_of_another_config_or_other_rows(tiny_run, tmp_path):
    own = tiny_run.plan.experiment
    check_workdir(tmp_path, own, with_data=True)
    check_workdir(tiny_run.workdir, own, with_data=True)
    check_workdir(tiny_run.workdir, own.replaced({"steps": 9, "data.num_train": 7}), with_data=False)
    with pytest.raises(ConfigError, match=r"run of another config: batch_size was 16, is 8\.") as error:
        check_workdir(tiny_run.workdir, own.replaced({"batch_size": 8}), with_data=False)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"has other rows, or reads them otherwise \(data\.num_train\)"):
        check_workdir(tiny_run.workdir, own.replaced({"data.num_train": 7}), with_data=True)
    assert metrics_of(tiny_run.workdir) == tiny_run.metrics
    assert metrics_of(tmp_path) == {}
    step = jaxdl.restore(tiny_run.workdir, step="best").step
    assert metrics_of(tiny_run.workdir, "best") == metrics_of(tiny_run.workdir, step) == tiny_run.metrics
    with pytest.raises(ConfigError, match="there is no checkpoint of step 999"):
        metrics_of(tiny_run.workdir, 999)
    path = write_experiment(tmp_path, own)
    assert jaxdl.load(path) == own


def test_overrides_of_an_experiment():
    found = load(f"{ROOT}/configs/digits.py", {"epochs": 2}, gpus=True)
    assert (found.epochs, found.mesh.cpu_devices) == (2, None)
    with pytest.raises(ConfigError, match="no such file"):
        load("nowhere.py", {}, gpus=False)


@pytest.mark.parametrize(
    ("config", "form", "overrides", "has_effect"),
    [
        ("tabular_mlp", "numbers", {"data.normalize": False, "data.num_classes": None, "data": "tabular"}, True),
        ("tabular_mlp", "numbers", {"epochs": 2, "data.test_fraction": 0.3, "data.num_classes": 4}, True),
        ("tabular_mlp", "numbers", {"data.train": ("x.csv",)}, False),
        ("tabular_mlp", "numbers", {"data.features": ("a",)}, False),
        ("tabular_mlp", "images", {"data.normalize": False}, False),
        ("photographs", "images", {"data.photos.size": 64}, True),
        ("photographs", "numbers", {"data.photos.size": 64}, False),
    ],
)
def test_overrides_of_data_take_effect_or_are_an_error(config, form, overrides, has_effect):
    experiment = load(f"{ROOT}/configs/{config}.py", overrides, gpus=False)
    data = data_of(experiment.data, form, (), (), ["one"], None)
    with (
        contextlib.nullcontext() if has_effect else pytest.raises(ConfigError, match=r"overrides: data.*has no effect")
    ):
        check_overrides(overrides, experiment, data)


# Scoring


@pytest.mark.skipif(importlib.util.find_spec("pyspark") is not None, reason="pyspark is installed")
def test_without_pyspark_the_extra_is_named():
    with pytest.raises(ConfigError, match=r"needs the package pyspark.*pip install 'jaxdl\[spark\]'"):
        _ = jaxdl.platform.spark.JaxdlClassifier
    with pytest.raises(AttributeError):
        _ = jaxdl.platform.spark.Nothing
