"""Tokenizers of encoders on their way from and to Hugging Face: the older forms, and what stands around a text."""

import json
from itertools import pairwise

import gpt2_tokens
import pytest
import tokenizers
from encoder_cases import CONFIGS, recorded
from older_tokenizers import CASES, TEXTS, WORDS, write_older
from test_encoders import write_checkpoint
from test_labelled_texts import TOKENIZER

import jaxdl
from jaxdl.data import Codec
from jaxdl.data.text.framing import Framer
from jaxdl.inference.convert.__main__ import main as convert
from jaxdl.inference.convert.byte_bpe import gpt2_tokenizer, roberta_tokenizer
from jaxdl.inference.convert.layouts import layout_of
from jaxdl.inference.convert.special import keep_tokenizer, write_frame, write_inputs, write_tokenizer
from jaxdl.inference.convert.word_piece import BERT_FILES, about_case, bert_tokenizer


@pytest.mark.parametrize("name", CASES)
def test_tokens_of_the_older_forms_are_those_of_transformers(name, tmp_path):
    """Of texts and pairs, with the types of BERT."""
    write_older(tmp_path, name)
    made = bert_tokenizer(tmp_path) if name.startswith("bert") else roberta_tokenizer(tmp_path)
    tokenizer, wanted = tokenizers.Tokenizer.from_str(made), recorded()["older_tokenizers"][name]
    assert [tokenizer.encode(text).ids for text in TEXTS] == wanted["single"]
    pairs = [tokenizer.encode(*pair) for pair in pairwise(filter(str.strip, TEXTS))]
    assert [pair.ids for pair in pairs] == wanted["pairs"]
    if wanted["types"]:
        assert [pair.type_ids for pair in pairs] == wanted["types"]


@pytest.mark.parametrize(("name", "case"), [("bert", "bert_cased"), ("distilbert", "bert"), ("roberta", "roberta")])
def test_a_checkpoint_with_an_older_form_is_converted(name, case, tmp_path, capsys):
    size = 304 if name == "roberta" else len(WORDS)
    source = write_checkpoint(tmp_path / "hf", name)
    write_older(source, case)
    convert(["from-hf", str(source), str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert f"its tokenizer has {size:,} tokens" in said
    assert ("texts become lower case" in said) == (case == "bert")
    predictor = jaxdl.restore(tmp_path / "run")
    assert predictor.codec.vocab_size == size
    assert predictor.predict("Hello world").name in ("no", "maybe", "yes")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("vocab.txt", "a\nb\n", "vocab.txt: it has no token '[UNK]'"),
        ("vocab.txt", "", "vocab.txt: it has no token '[UNK]'"),
        ("vocab.txt", "\udce9", "vocab.txt: not UTF-8"),
        ("tokenizer_config.json", "[", "not JSON of an object"),
        ("tokenizer_config.json", '{"tokenizer_class": "BertJapaneseTokenizer"}', "'BertJapaneseTokenizer' is not"),
        ("tokenizer_config.json", '{"do_basic_tokenize": false}', "do_basic_tokenize or never_split is not converted"),
        ("added_tokens.json", '{"[new]": 7}', "'[new]' is said to be number 7"),
    ],
)
def test_a_damaged_vocabulary_is_told(name, content, problem, tmp_path):
    write_older(tmp_path, "bert")
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(jaxdl.ConfigError) as told:
        keep_tokenizer(tmp_path, {}, tmp_path / "run", older=BERT_FILES)
    assert problem in str(told.value)


@pytest.mark.parametrize("form", ["words", "bytes", "byte_bpe"])
def test_what_jaxdl_puts_around_a_text_is_written(form, tmp_path):
    """Of tokenizers that put nothing there themselves; transformers is told the length, and to give types."""
    codec = Codec(None)
    if form == "words":
        (tmp_path / "words.json").write_text(json.dumps(TOKENIZER | {"post_processor": None}))
        codec = Codec(str(tmp_path / "words.json"))
    elif form == "byte_bpe":  # Its end of text stands on both sides.
        gpt2_tokens.write_tokenizer(tmp_path, added=False)
        (tmp_path / "tokenizer.json").write_text(gpt2_tokenizer(tmp_path), encoding="utf-8")
        codec = Codec(str(tmp_path / "tokenizer.json"))
    (folder := tmp_path / "hf").mkdir()
    write_tokenizer(codec, folder)
    around = layout_of(CONFIGS["bert"], "").around(codec)
    assert around is not None
    write_frame(folder, codec, around, 2)
    write_inputs(folder, num_types=2, length=16)
    written, texts, seconds = (
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")),
        ["a b c", ""],
        ["b", "c a"],
    )
    for others in (None, seconds):
        framed = Framer(codec, 16)(texts, others)
        found = [written.encode(*pair) for pair in zip(texts, *([] if others is None else [others]), strict=True)]
        assert [one.ids for one in found] == [tokens.tolist() for tokens in framed.tokens]
        assert [one.type_ids for one in found] == [types.tolist() for types in framed.types]
    told = json.loads((folder / "tokenizer_config.json").read_text())
    assert (told["model_max_length"], told["model_input_names"][1]) == (16, "token_type_ids")
    assert layout_of(CONFIGS["bert"], "").around(Codec(str(folder))) is None, "now it does so itself"


def test_lower_case_is_told_where_words_have_upper_case(tmp_path):
    write_older(tmp_path, "bert")
    assert "has words such as 'Hello'" in about_case(tmp_path)[0]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    assert about_case(tmp_path) == ()


def test_a_folder_of_an_older_form_is_told(tmp_path):
    """As --data.tokenizer, and where a layout does not say how its text is split."""
    write_older(tmp_path, "bert")
    with pytest.raises(jaxdl.ConfigError, match=r"no tokenizer.json, but vocab.txt, an older form. Convert the check"):
        Codec(str(tmp_path))
    (tmp_path / "vocab.txt").rename(tmp_path / "sentencepiece.bpe.model")
    with pytest.raises(jaxdl.ConfigError, match=r"but sentencepiece.bpe.model, an older form"):
        Codec(str(tmp_path))
    (tmp_path / "sentencepiece.bpe.model").rename(tmp_path / "tokenizer.model")
    with pytest.raises(jaxdl.ConfigError, match=r"it has no tokenizer.json. Name its .*/tokenizer.model"):
        Codec(str(tmp_path))


def test_a_model_of_sentencepiece_of_another_kind_is_told(tmp_path, capsys):
    source = write_checkpoint(tmp_path / "hf", "xlm_roberta")
    gpt2_tokens.write_tokenizer(source, added=False)
    (source / "sentencepiece.bpe.model").write_bytes(b"")
    convert(["from-hf", str(source), str(tmp_path / "run")])
    told = capsys.readouterr().out
    assert "its vocab.json and merges.txt and sentencepiece.bpe.model alone do not say how text is split" in told
