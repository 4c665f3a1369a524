"""Tokens that are added when a checkpoint is converted: the mean of the others' rows, on the way back too."""

import json

import numpy as np
import pytest
from mistakes import refusal
from test_convert import TOKENIZER, TOKENS, WORDS, bits, write_checkpoint

import jaxdl
from jaxdl.inference.convert.__main__ import main


@pytest.mark.parametrize("name", ["llama3", "qwen2"])
def test_tokens_are_added_as_the_mean_of_the_others(name, tmp_path, capsys):
    """Of an output layer of its own, and a tied one: the first takes a row that no token had, the last ones are new."""
    folder = write_checkpoint(tmp_path / "hf", name)
    vocab = {"<eos>": 0, **{f"w{n}": n for n in range(1, 31)}}
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER | {"model": WORDS | {"vocab": vocab}}))
    main(["from-hf", str(folder), str(tmp_path / "run"), "--add-tokens", "<|a|>,w3,<|b|>"])
    told = " ".join(capsys.readouterr().out.split())
    assert "tokens that are added: <|a|> (31), <|b|> (32)." in told
    assert "the tokenizer has these tokens already: w3" in told
    predictor = jaxdl.restore(tmp_path / "run")
    assert predictor.codec.encode("w3 <|a|> <|b|>") == [3, 31, 32]
    assert predictor.parts.data_spec.vocab_size == 33
    table = np.asarray(predictor.params["embedding"])
    assert table.shape == (33, 16)
    np.testing.assert_allclose(table[31:], table[:31].mean(0, keepdims=True).repeat(2, 0), atol=1e-6)
    logits = predictor.logits(TOKENS % 31)
    np.testing.assert_allclose(logits[..., 31:], logits[..., :31].mean(-1, keepdims=True).repeat(2, -1), atol=1e-4)
    main(["to-hf", str(tmp_path / "run"), str(tmp_path / "back")])
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == 33
    rows = {x[1] for key, x in bits(tmp_path / "back").items() if "embed_tokens" in key or "lm_head" in key}
    assert rows == {(33, 16)}
    added = json.loads((tmp_path / "back" / "tokenizer.json").read_text())["added_tokens"]
    assert {(token["content"], token["id"]) for token in added} >= {("<|a|>", 31), ("<|b|>", 32)}


@pytest.mark.parametrize(
    ("given", "tokenizer", "problem"),
    [
        ("<a>,,<b>", True, "give different tokens with commas between them"),
        ("<a>,<a>", True, "give different tokens with commas between them"),
        ("<a>", False, "tokens are added to a tokenizer.json"),
    ],
)
def test_what_cannot_be_added_is_told(tmp_path, capsys, given, tokenizer, problem):
    folder = write_checkpoint(tmp_path / "hf", "llama3")
    if tokenizer:
        (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    assert problem in refusal(capsys, "from-hf", folder, tmp_path / "run", "--add-tokens", given, run=main)
    assert not (tmp_path / "run").exists()
