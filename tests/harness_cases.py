"""A small checkpoint and three tasks of lm-evaluation-harness, made from a seed.

`scripts/record_lm_eval.py` recorded the scores that the harness's own model of Hugging Face's checkpoints has.
"""

import json
from pathlib import Path

import hf_cases
import numpy as np
from safetensors.numpy import save_file

RECORDED = Path(__file__).parent / "harness_scores.json"
TASKS = ("small_choice", "small_rolling", "small_written")
CHAT_TASKS = ("small_choice", "small_prefixed", "small_written")
"""Those that are asked as conversations too, of which the second begins the answer."""
SYSTEM = "the cat"
"""A message that the template does not take."""
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
LENGTH, CHAT_LENGTH = 96, 384
_CASE = "llama3"
_WORDS = tuple("the a red blue fish cat runs swims over under two three and then é naïve".split())  # noqa: SIM905


def write_checkpoint(folder, length=LENGTH):
    """A Llama whose tokens are bytes and pairs of them, with a start token before every text; returns the folder."""
    import tokenizers

    folder.mkdir(parents=True)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("e", "d"), ("i", "s"), ("Ġ", "a"), ("Ġ", "f")]
    vocab = {
        name: number for number, name in enumerate(["<s>", "</s>", *alphabet, *("".join(pair) for pair in merges)])
    }
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "chat_template": TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    sizes = {"vocab_size": len(vocab), "bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": length}
    (folder / "config.json").write_text(json.dumps(hf_cases.CONFIGS[_CASE] | sizes))
    shapes = hf_cases.recorded()[_CASE]["shapes"]
    shapes = {name: [len(vocab), 16] if shape[0] == 32 and len(shape) > 1 else shape for name, shape in shapes.items()}
    save_file(hf_cases.weights(shapes), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tasks(folder):
    """The tasks' YAML files and their data; returns the folder."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(21)

    def words(count):
        return " ".join(rng.choice(_WORDS, count))

    choices = [
        {"question": words(int(rng.integers(2, 9))), "choices": [words(int(rng.integers(1, 4))) for _ in range(3)],
         "answer": int(rng.integers(0, 3))}
        for _ in range(14)
    ]  # fmt: skip
    texts = [{"text": words(count)} for count in (3, 12, 40, 75)]
    prompts = [{"question": words(int(rng.integers(1, 24))), "answer": "fish"} for _ in range(7)]
    common = {"dataset_path": "json", "test_split": "test"}
    tasks = {
        "small_choice": (choices, {
            "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
            "doc_to_choice": "{{choices}}", "fewshot_split": "test", "num_fewshot": 1,
            "metric_list": [{"metric": "acc", "aggregation": "mean"}, {"metric": "acc_norm", "aggregation": "mean"}],
        }),
        "small_rolling": (texts, {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
        }),
        "small_written": (prompts, {
            "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["E", "15", "fi"], "max_gen_toks": 24, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        }),
    }  # fmt: skip
    choice = tasks["small_choice"][1] | {"gen_prefix": "a fish "}
    tasks["small_prefixed"] = (choices, {name: x for name, x in choice.items() if name != "num_fewshot"})
    for name, (rows, settings) in tasks.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        files = {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        # YAML takes JSON.
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name} | common | files | settings))
    return folder


def answers(results):
    """Task -> the model's answer to each request, in order."""
    return {
        task: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for task, samples in results["samples"].items()
    }


def conversations(lm_eval, folder, multiturn, **model):
    """The results of `CHAT_TASKS` as conversations, with examples as turns or not."""
    return lm_eval.simple_evaluate(
        **model,
        tasks=list(CHAT_TASKS),
        task_manager=lm_eval.tasks.TaskManager(include_path=str(folder)),
        num_fewshot=2,
        apply_chat_template=True,
        fewshot_as_multiturn=multiturn,
        system_instruction=SYSTEM,
        bootstrap_iters=0,
    )


def recorded():
    """ "scores": task -> metric -> value; "answers": as of `answers`.

    "turns" and "one_turn": both of `conversations`.
    """
    return json.loads(RECORDED.read_text())
