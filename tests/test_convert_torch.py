"""Networks of jaxdl in `transformers`: the same logits, and the same greedy text. Only where these are installed."""

import json

import numpy as np
import pytest
from hf_cases import CONFIGS, TOKENS
from test_convert import write_checkpoint

import jaxdl
from jaxdl.data import TextFiles
from jaxdl.inference.convert.__main__ import main
from jaxdl.models import Transformer
from jaxdl.optim import AdamW
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import LanguageModelling

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def logits_there(folder, tokens):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


@pytest.mark.parametrize("name", CONFIGS)
def test_both_ways(name, tmp_path):
    """The checkpoint and what is written again of it, read by transformers."""
    main(["from-hf", str(write_checkpoint(tmp_path / "hf", name)), str(tmp_path / "run")])
    main(["to-hf", str(tmp_path / "run"), str(tmp_path / "back"), "--layout", CONFIGS[name]["model_type"]])
    here = jaxdl.restore(tmp_path / "run").logits(TOKENS)
    for folder in ("hf", "back"):
        np.testing.assert_allclose(here, logits_there(tmp_path / folder, TOKENS), atol=1e-4)


@pytest.mark.parametrize(
    "model",
    [
        Transformer(num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2),
        Transformer(num_layers=2, embed_dim=32, num_heads=4, positions="learned", max_length=128, norm="layer",
                    mlp="gelu", biases="all", scan_layers=False),
    ],
    ids=["llama", "gpt2"],
)  # fmt: skip
def test_a_model_trained_here_writes_the_same_text_there(model, tmp_path):
    experiment = Experiment(
        model=model,
        data=TextFiles(length=64, max_bytes=100_000),
        task=LanguageModelling(),
        optimizer=AdamW(learning_rate=1e-2),
        batch_size=8,
        steps=40,
    )
    jaxdl.train(experiment, tmp_path / "run", quiet=True)
    main(["to-hf", str(tmp_path / "run"), str(tmp_path / "hf")])
    prompt = "import "
    here = "".join(jaxdl.restore(tmp_path / "run").generate(prompt, num_tokens=40, temperature=0, stop_at_end=False))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    given = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    assert given["input_ids"].tolist() == [list(prompt.encode())]
    made = model.generate(given["input_ids"], do_sample=False, max_new_tokens=40, eos_token_id=None, pad_token_id=0)
    assert tokenizer.decode(made[0][len(prompt) :]) == here
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 0
