"""A trained network as a model of lm-evaluation-harness."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.data import Codec
from jaxdl.data.text.chat_template import ChatTemplate
from jaxdl.inference.decoding.settings import Sampling
from jaxdl.inference.generation import Decoder, Writing
from jaxdl.inference.lm_eval.chats import render_context
from jaxdl.inference.lm_eval.package import import_harness
from jaxdl.inference.predictor import restore
from jaxdl.inference.scoring import ScoredText, Scorer

_NUM_TOKENS = 256
"""Tokens of a text whose task does not say how many, as in the harness's own models."""
_NAMES = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
          "repetition_penalty": "repetition_penalty", "seed": "seed"}  # fmt: skip
"""What a task may say of how texts are drawn -> the setting of `Sampling`."""


class HarnessModel:
    """The methods of the harness's model `jaxdl`, which `model_class` makes of them.

    What is computed is that of the harness's own model of Hugging Face's checkpoints: texts begin with what the
    tokenizer puts before every text, and the first token of one that begins with nothing follows the start of text, or
    without one the end of text.
    """

    def __init__(
        self,
        workdir: str | None = None,
        *,
        step: str | int = "newest",
        average: int = 1,
        batch_size: int | str | None = None,
        max_length: int | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        parts: HarnessParts | None = None,
    ) -> None:
        """`step` and `average` are those of `jaxdl.restore`; `batch_size` texts are written side by side.

        `max_length` is how many tokens the network reads at a time, by default as many as it was trained on. Instead of
        a workdir `parts` may be given. `device` is not used, since JAX chooses.
        """
        super().__init__()  # That of the harness's base class.
        self.cache_hook: Any
        del max_batch_size, device
        if parts is None:
            if workdir is None:
                raise ConfigError("lm_eval: the model jaxdl needs the workdir of a run: --model_args workdir=runs/lm.")
            which: Any = int(step) if str(step).isdecimal() else step
            predictor = restore(workdir, step=which, average=average)
            parts = HarnessParts.of(predictor, what=f"{predictor.workdir}, step {predictor.step}")
        if max_length is not None and not 0 < max_length <= parts.scorer.context:
            reads = parts.scorer.context
            raise ConfigError(f"lm_eval: max_length {max_length}: the network reads 1 to {reads:,} tokens at a time.")
        self._parts, self._codec = parts, parts.codec
        self._num_cut_requests, self._num_cut_tokens = 0, 0
        self._unwritten = {self._codec.pad, self._codec.start, self._codec.end}
        self.max_length = max_length or parts.scorer.context
        self.batch_size = _batch_size(batch_size)
        if self.batch_size < 1:
            raise ConfigError(f"lm_eval: batch_size {batch_size}: give a whole number, 1 or more.")

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._codec.separator[-1]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that begins with none."""
        return self._codec.packed_mark

    @property
    def tokenizer_name(self) -> str:
        """Identifies the tokenizer in the harness's caches of requests."""
        template = self._parts.template()
        of_template = "" if template is None else f"-{_digest(template)}"
        return f"jaxdl-{self._codec.fingerprint()}{of_template}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the chat template, None where none is asked for. Raises ConfigError for a name, or without one.

        What is asked for by name is one of several templates of a tokenizer, of which a run keeps the one it has.
        """
        if not chat_template:
            return None
        if isinstance(chat_template, str) and chat_template != "default":
            raise ConfigError(
                f"lm_eval: --apply_chat_template {chat_template}: a run has one chat template, without a name. Leave "
                "the name out."
            )
        return self._template().source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; see `jaxdl.inference.lm_eval.chats.render_context`."""
        return render_context(self._template(), chat_history, prompt=add_generation_prompt)

    def _template(self) -> ChatTemplate:
        """The chat template. Raises ConfigError without one of the network's own."""
        template = self._parts.template()
        if template is None:
            raise ConfigError(
                f"lm_eval: {self._parts.what}: the run has no chat template, nor has its tokenizer. Leave out "
                "--apply-chat-template, or tune it on conversations (--data conversations)."
            )
        return template

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results."""
        cut = {"num_cut_requests": self._num_cut_requests, "num_cut_tokens": self._num_cut_tokens}
        return {"model": self._parts.what, "max_length": self.max_length} | cut

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The tokens of a text, after those that every text begins with unless it has its start already."""
        tokens = self._codec.encode(string)
        mark = self._codec.decode([self.prefix_token_id])
        begun = add_special_tokens is None and bool(mark.strip("\0")) and string.startswith(mark)
        return tokens if begun or add_special_tokens is False else [*self._codec.opening, *tokens]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        texts, cut = [], list[int]()
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise ConfigError(
                    f"lm_eval: a continuation has {len(continuation):,} tokens, and the network reads "
                    f"{self.max_length:,} at a time. Leave the task out, or train on longer texts (--data.length)."
                )
            whole = [*context, *continuation][-(self.max_length + 1) :]
            cut.append(len(context) + len(continuation) - len(whole))
            texts.append(ScoredText(whole, len(whole) - len(continuation)))
        self._count_cut(cut)
        with import_harness("tqdm").tqdm(total=len(texts), desc="log-likelihoods", disable=disable_tqdm or None) as bar:

            def advance(count: int) -> None:
                bar.update(count)
                self._parts.poll()

            sums, greedy = self._parts.scorer.are_likeliest(texts, advance=advance)
        answers = [(float(x), bool(is_greedy)) for x, is_greedy in zip(sums, greedy, strict=True)]
        for (texts_of, _, _), answer in zip(requests, answers, strict=True):
            if texts_of is not None:
                self.cache_hook.add_partial("loglikelihood", texts_of, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, whose windows are the harness's own: each token is scored once."""
        utils = import_harness("lm_eval.utils")
        windows, counts = [], []
        for (text,) in (request.args for request in requests):
            pairs = utils.get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            of_text = [(None, *utils.make_disjoint_window(pair)) for pair in pairs]
            windows += of_text
            counts.append(len(of_text))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        sums = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that continues each context, up to a stop text; those of equal settings side by side."""
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        cut = list[int]()
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        with import_harness("tqdm").tqdm(total=len(requests), desc="texts", disable=disable_tqdm or None) as bar:
            for numbers in groups.values():
                how = self._sampling(requests[numbers[0]].args[1])
                whole = {n: self.tok_encode(requests[n].args[0]) for n in numbers}
                prompts = {n: tokens[-(self.max_length - how.num_tokens) :] for n, tokens in whole.items()}
                cut += [len(tokens) - len(prompts[n]) for n, tokens in whole.items()]
                order = sorted(numbers, key=lambda n: -len(prompts[n]))
                rows = min(self.batch_size, len(order))
                for first in range(0, len(order), rows):
                    batch = order[first : first + rows]
                    for n, text in zip(batch, self._write([prompts[n] for n in batch], how, batch, rows), strict=True):
                        texts[n] = text
                        self.cache_hook.add_partial("generate_until", requests[n].args, text)
                    bar.update(len(batch))
        self._count_cut(cut)
        return texts

    def _count_cut(self, cut: Sequence[int]) -> None:
        """Counts what the contexts of all requests of a kind lack, `cut` tokens each. Warns if there is something."""
        if lacking := sum(tokens > 0 for tokens in cut):
            self._num_cut_requests += lacking
            self._num_cut_tokens += sum(cut)
            warnings.warn(
                f"lm_eval: {lacking:,} of {len(cut):,} contexts are longer than the {self.max_length:,} tokens that "
                f"the network reads at a time, and lack their first tokens, {sum(cut):,} in all",
                stacklevel=3,
            )

    def _write(self, prompts: Sequence[Sequence[int]], how: Sampling, places: Sequence[int], rows: int) -> list[str]:
        prompts = [prompt or [self.prefix_token_id] for prompt in prompts]
        writing = Writing(self._parts.decoder(), prompts, how, places=places, rows=rows)
        tokens: list[list[int]] = [[] for _ in prompts]
        while not writing.done.all():
            self._parts.poll()
            for row, news in enumerate(writing.more()):
                tokens[row] += [
                    token for token in news if token not in self._unwritten and token not in how.stop_tokens
                ]
                if any(text in self._codec.decode(tokens[row]) for text in how.stop):
                    writing.end(row)
        # As the harness has it: of the new tokens alone, which may lack the space before the first word.
        return [_until(self._codec.decode(each), how.stop) for each in tokens]

    def _sampling(self, given: dict[str, Any]) -> Sampling:
        """The settings of a task. Raises ConfigError for those that are not known."""
        utils = import_harness("lm_eval.models.utils")
        left = dict(utils.normalize_gen_kwargs(given, _NUM_TOKENS))
        eos = self._codec.decode([self.eot_token_id]) or None
        stop = utils.handle_stop_sequences(left.pop("until", None), eos=eos)
        num_tokens, samples = int(left.pop("max_gen_toks")), left.pop("do_sample", False)
        if num_tokens >= self.max_length:
            raise ConfigError(
                f"lm_eval: a task writes up to {num_tokens:,} tokens, and the network reads {self.max_length:,} at a "
                "time, prompt included. Give fewer (max_gen_toks in its generation_kwargs), or leave it out."
            )
        drawn: dict[str, Any] = {_NAMES[name]: left.pop(name) for name in _NAMES if name in left}
        if left:
            raise ConfigError(f"lm_eval: a task has generation_kwargs that are not known here: {', '.join(left)}.")
        if not samples:
            drawn = {name: value for name, value in drawn.items() if name == "repetition_penalty"} | {
                "temperature": 0.0
            }
        how = Sampling(num_tokens=num_tokens, stop=tuple(text for text in stop if text), **drawn)
        return how.with_stop_tokens((*self._codec.ends, self.eot_token_id))


@dataclasses.dataclass
class HarnessParts:
    """What a model computes with: of a restored run, or of one that trains."""

    scorer: Scorer
    decoder: Callable[[], Decoder]
    codec: Codec
    what: str
    template: Callable[[], ChatTemplate | None] = lambda: None
    """The chat template of the network; None: it has none of its own."""
    poll: Callable[[], None] = lambda: None
    """Called after each batch; what it raises ends the measurement."""

    @classmethod
    def of(cls, predictor: Any, what: str) -> HarnessParts:
        """Those of a `jaxdl.Predictor`. Raises ConfigError for a network that does not read text."""
        predictor.check_text("lm_eval")

        def template() -> ChatTemplate | None:
            return predictor.chat_template if predictor.has_chat_template else None

        return cls(Scorer(predictor), lambda: predictor.decoder, predictor.codec, what, template)


def _digest(template: ChatTemplate) -> str:
    """Tells templates apart."""
    return hashlib.sha256(json.dumps(template.to_json(), sort_keys=True).encode()).hexdigest()[:16]


def _batch_size(given: int | str | None) -> int:
    """How many texts are written side by side; `auto` and `auto:N` are the harness's words. Raises ConfigError."""
    if given is None or str(given).partition(":")[0] == "auto":
        return 16
    try:
        return int(given)
    except ValueError:
        raise ConfigError(f"lm_eval: batch_size {given}: give a whole number, 1 or more, or auto.") from None


def _until(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop texts."""
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))]


@functools.cache
def model_class() -> Any:
    """The class of the harness's model `jaxdl`, which is registered there. Raises ConfigError without lm-eval."""
    base = import_harness("lm_eval.api.model").TemplateLM
    made = type("JaxdlLM", (HarnessModel, base), {"__doc__": HarnessModel.__doc__, "__module__": __name__})
    return import_harness("lm_eval.api.registry").register_model("jaxdl")(made)
