"""Files of text in all forms: encodings and byte order marks, compression by name, tables; the same in every reader."""

import bz2
import gzip
import json
import lzma

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from runs import tiny_experiment

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.core.runs import read_lines
from jaxdl.data import Documents, Pairs, Tabular, spec_to_json
from jaxdl.data.text.token_windows import TextFiles
from jaxdl.models import Transformer
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.run.plan.data import read_data
from jaxdl.training.run.workdir.records import Workdir, keep_examples
from jaxdl.training.tasks import LanguageModelling

TEXTS = ["first document", "second one", "third, é one"]
FORMS = {
    "a.jsonl": ("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS), "file"),
    "a.json": (json.dumps([{"text": text} for text in TEXTS], indent=1, ensure_ascii=False), "file"),
    "a.txt": ("\n".join(TEXTS) + "\n", "line"),
    "a.tsv": ("\t".join(TEXTS) + "\n", "file"),
    "a.csv": ("id,text\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(TEXTS)), "file"),
}
WRITERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
TABLE = "café,b,label\n" + "".join(f"{n},{n % 5},{n % 2}\n" for n in range(20))


def documents(path, **changes):
    """The documents, in as many spans as there can be."""
    [plan] = Documents(paths=(str(path),), shards=f"{path.parent}/shards", **changes).plans()
    return [text for part in plan.texts.parts(1) for text in plan.texts.read(part)]


def columns(path):
    return Tabular(train=(str(path),)).build().train.spec.columns


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("name", FORMS)
def test_marks_and_compressions_change_no_document(tmp_path, name, suffix):
    content, document = FORMS[name]
    for encoding in ("utf-8", "utf-8-sig"):
        for end in (suffix, suffix.upper()):
            path = tmp_path / f"{encoding}{name}{end}"
            path.write_bytes(WRITERS[suffix](content.encode(encoding)))
            assert documents(path, document=document) == TEXTS


@pytest.mark.parametrize("suffix", WRITERS)
def test_marks_and_compressions_change_no_table(tmp_path, suffix):
    for encoding in ("utf-8", "utf-8-sig"):
        for end in (suffix, suffix.upper()):
            path = tmp_path / f"{encoding}.csv{end}"
            path.write_bytes(WRITERS[suffix](TABLE.encode(encoding)))
            assert columns(path) == ("café", "b")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_text_that_is_no_utf_8_by_its_mark_is_refused_by_every_reader(tmp_path, encoding):
    def written(name, text):
        (tmp_path / name).write_bytes(
            ("\ufeff" if encoding.endswith("-be") else "").encode(encoding) + text.encode(encoding)
        )
        return tmp_path / name

    readers = {
        **{name: lambda path: documents(path) for name in FORMS},
        "t.csv": columns,
        "p.tsv": lambda path: list(Pairs(folder=str(tmp_path), train=(path.name,), valid=(path.name,)).pairs("train")),
        "x.py": lambda path: TextFiles(paths=(str(path),), length=2).build(),
        "lines": lambda path: read_lines(path, "--input"),
    }
    for name, read in readers.items():
        with pytest.raises(ConfigError, match=rf"{name}.*UTF-(16|32)"):
            read(written(name, FORMS.get(name, ("a\tb\n" * 9, ""))[0]))


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b"a,label\n" + b"1,0\n" * 999, mtime=0)[:-20], b"a,label\n1,0\n"],
    ids=["cut short", "not compressed"],
)
def test_damaged_compressions_are_told(tmp_path, content):
    for name in ("a.csv.gz", "a.jsonl.xz", "a.csv.bz2", "a.txt.xz"):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name}: it cannot be read"):
            (columns if ".csv" in name else documents)(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TABLE.encode("latin-1"), r"names of its columns.*are not UTF-8 \(b'caf\\xe9'\)\. Convert it"),
        (b"a,a,label\n1,2,0\n", "it has 2 columns named 'a'"),
    ],
)
def test_names_of_columns_that_cannot_be_used(tmp_path, content, message):
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        columns(tmp_path / "x.csv")


def test_a_name_twice_in_parquet(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array([1, 2])] * 3, names=["a", "a", "label"])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match="it has 2 columns named 'a'"):
        columns(tmp_path / "x.parquet")


def test_blank_lines_of_a_table_are_said(tmp_path):
    (tmp_path / "x.csv").write_text(TABLE.replace("\n3,", "\n\n3,"))
    train = Tabular(train=(str(tmp_path / "x.csv"),)).build().train
    assert train.remark().endswith(f"; 1 blank line was left out ({tmp_path}/x.csv: line 5)")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "id,body\n1,x\n", "it has no column 'text'; it has id, body"),
        ("a.csv", "id,text\n1\n", "row 1: it has 1 cells, and the first line 2 names"),
        ("a.csv", "text,text\n1,2\n", "it has 2 columns named 'text'"),
        (
            "a.json",
            '[{"instruction": "i", "output": "o"}]',
            "element 1 of the array: it has no 'text', but instruction, output",
        ),
        ("a.json", '[{"text": "x"}', "it begins like a JSON array, but is not one"),
        ("a.json", '{"text":\n "x"}', "line 1 is not JSON"),
    ],
)
def test_tables_and_arrays_that_cannot_be_used(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        documents(tmp_path / name)


def test_cells_with_lines_and_pairs_in_an_array(tmp_path):
    (tmp_path / "a.csv").write_text('text,n\n"two\nlines, ""quoted""",1\n,2\nx\u2028y,3\n')
    assert documents(tmp_path / "a.csv") == ['two\nlines, "quoted"', "", "x\u2028y"]
    rows = [{"instruction": f"i{n}", "input": "", "output": f"o{n}"} for n in range(3)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    data = Pairs(folder=str(tmp_path), train=("a.json",), valid=("a.json",), source="instruction", target="output")
    assert list(data.pairs("train")) == [(f"i{n}", f"o{n}") for n in range(3)]


def test_two_files_with_marks_stay_side_by_side(tmp_path):
    """In parts as small as there can be, with empty lines."""
    (tmp_path / "s.txt").write_text("a\n\n\nc\n", encoding="utf-8-sig")
    (tmp_path / "t.txt").write_text("b\n\nx\nd\n")
    texts = Pairs(folder=str(tmp_path), train=("s.txt", "t.txt"), valid=("s.txt", "t.txt")).texts("train")
    for part_bytes in (1, 3, 10**6):
        pairs = [pair for part in texts.parts(part_bytes) for pair in texts.pairs(part)]
        assert pairs == [("a", "b"), ("", ""), ("", "x"), ("c", "d")]


def test_a_text_file_without_its_mark(tmp_path):
    for name, encoding in (("a.py", "utf-8"), ("b.py", "utf-8-sig")):
        (tmp_path / name).write_text("print(1)\n" * 50, encoding=encoding)
    plain, marked = (TextFiles(paths=(str(tmp_path / name),), length=8).build().train for name in ("a.py", "b.py"))
    np.testing.assert_array_equal(plain.batch(np.arange(9))["tokens"], marked.batch(np.arange(9))["tokens"])
    (tmp_path / "c.py.gz").write_bytes(gzip.compress(b"x" * 99))
    with pytest.raises(ConfigError, match="it is compressed"):
        TextFiles(paths=(str(tmp_path / "c.py.gz"),), length=8).build()


@pytest.mark.parametrize("case", ["hidden file", "byte order mark"])
def test_a_run_goes_on_with_the_text_that_it_began_with(case, tmp_path):
    """Earlier versions took hidden files and byte order marks, and recorded the number of windows alone."""
    text = bytes(range(97, 117)) * 5
    folder, workdir = tmp_path / "texts", tmp_path / "run"
    folder.mkdir()
    workdir.mkdir()
    if case == "hidden file":
        (folder / "a.txt").write_bytes(text)
        (folder / ".b.txt").write_bytes(text)
        before = text  # One file was held out, the other trained on.
    else:
        before = b"\xef\xbb\xbf" + text + text
        (folder / "a.txt").write_bytes(before)
        before = before[:102]  # Half of 203 bytes, rounded to an even number.
    data = TextFiles(paths=(str(folder),), glob="**/*.txt", length=3, test_fraction=0.5)
    recorded = {
        "train": {"examples": (len(before) - 1) // 3, "content": ""},
        "test": {"examples": 33 if case == "hidden file" else 34, "content": ""},
    }

    fresh = read_data(data, Workdir(workdir))
    assert (len(fresh.train), len(fresh.test)) == ((16, 17) if case == "hidden file" else (33, 33))
    (workdir / "examples.json").write_text(json.dumps(recorded))
    (workdir / "data.json").write_text(spec_to_json(fresh.train.spec))
    old = read_data(data, Workdir(workdir))
    tokens = old.train.batch(np.arange(len(old.train)))["tokens"]
    assert tokens[:, :3].ravel().tolist() == list(before[: 3 * len(tokens)])
    keep_examples(workdir, old.content(), old.former_contents())
    assert read_data(data, Workdir(workdir)).content() == old.content(), "known by its content from then on"
    (folder / "a.txt").write_bytes((folder / "a.txt").read_bytes()[::-1])
    changed = read_data(data, Workdir(workdir))
    with pytest.raises(ConfigError, match="the data changed since its run began"):
        keep_examples(workdir, changed.content(), changed.former_contents())


@pytest.mark.slow
def test_train_and_evaluate_read_the_text_of_a_run_of_an_earlier_version(tmp_path):
    """Its examples.json counts windows with a hidden file, which is not read today."""
    folder, workdir = tmp_path / "texts", tmp_path / "run"
    for place in (folder, workdir):
        place.mkdir()
    for name in ("a.txt", ".b.txt"):
        (folder / name).write_bytes(bytes(range(97, 117)) * 5)
    recorded = {"train": {"examples": 33, "content": ""}, "test": {"examples": 33, "content": ""}}
    (workdir / "examples.json").write_text(json.dumps(recorded))
    experiment = tiny_experiment(
        data=TextFiles(paths=(str(folder),), glob="**/*.txt", length=3, test_fraction=0.5),
        model=Transformer(num_layers=1, embed_dim=8, num_heads=1, mlp_dim=8),
        task=LanguageModelling(),
        batch_size=8,
        steps=2,
        mesh=MeshConfig(fsdp=1),
        evaluation={"every_steps": 1},
        checkpoint={"every_steps": 1},
    )
    for steps in (1, 2):
        run = jaxdl.train(experiment, workdir, quiet=True, devices=jax.devices()[:1], max_steps=steps)
        assert len(run.plan.splits.test) == 33
    predictor = jaxdl.restore(workdir)
    with predictor.held_out(experiment.data) as source:
        assert len(source) == 33
    assert predictor.evaluate()["loss"] == pytest.approx(run.summary["metrics"]["loss"], rel=1e-6)


def test_an_empty_file_is_not_the_only_one_that_is_held_out(tmp_path):
    """Whatever the names: with two files that have text, one is trained on and one is held out."""
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in ((f"a{number}", ""), (f"b{number}", "x" * 40), (f"c{number}", ""), (f"d{number}", "y" * 40)):
            (folder / f"{name}.txt").write_text(text)
        splits = TextFiles(paths=(str(folder),), glob="**/*.txt", length=3).build()
        assert len(splits.train) >= 9
        assert len(splits.test) >= 9
