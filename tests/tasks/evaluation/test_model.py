"""What a model with weights says to benchmarks, against plain transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.arguments import evaluation_arguments
from mindspeed_llm.tasks.evaluation.main import load_model
from mindspeed_llm.tasks.evaluation.model import EvaluatedModel
from mindspeed_llm.tasks.evaluation.requests import Answer, Generate, LogLikelihood, Question
from mindspeed_llm.tasks.inference.computation import computation
from mindspeed_llm.tasks.inference.generation import Completion
from mindspeed_llm.tasks.inference.source import ModelSource
from tests.tasks.evaluation.rows import POSITIONS, write_model

BAR = 1e-4
LONG = "far " * 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def _model(folder: Path, *flags: str) -> EvaluatedModel:
    model = load_model(evaluation_arguments(["--load", str(folder), *flags]))
    assert isinstance(model, EvaluatedModel)
    return model


@pytest.fixture(scope="module")
def plain(folder: Path) -> EvaluatedModel:
    return _model(folder)


@pytest.fixture(scope="module")
def conversation(folder: Path) -> EvaluatedModel:
    return _model(folder, "--hf-chat-template", "--evaluation-batch-size", "2")


@pytest.fixture(scope="module")
def prompt_reply(folder: Path) -> EvaluatedModel:
    return _model(folder, "--hf-chat-template", "--enable-thinking", "false")


class Reference:
    """transformers, one text at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def chat_ids(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(rendered, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def logprob(self, context: list[int], continuation: list[int]) -> float:
        tokens = (context + continuation)[-(POSITIONS + 1) :]
        logprobs = self.model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
        places = range(len(tokens) - 1 - len(continuation), len(tokens) - 1)
        return sum(float(logprobs[place, token]) for place, token in zip(places, continuation, strict=True))

    @torch.no_grad()
    def text(self, prompt: list[int], count: int) -> str:
        found = self.model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0, len(prompt) :]
        return self.tokenizer.decode(found, skip_special_tokens=True)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def _answers(model: EvaluatedModel, asked: list[Question]) -> list[Answer]:
    found: dict[int, Answer] = {}
    model.answer(asked, found.__setitem__)
    return [found[place] for place in range(len(asked))]


ASKED = [
    LogLikelihood(context="One and one is", continuations=(" two", " three", " 2")),
    Generate(prompt="Count: one,", stop=("\n",), max_new_tokens=6),
    LogLikelihood(context="One and two is", continuations=(" two", " three")),
    LogLikelihood(context=LONG, continuations=(" away", " off")),
    Generate(prompt=LONG, stop=(), max_new_tokens=4),
]


def test_answers_to_plain_prompts_are_those_of_transformers(plain: EvaluatedModel, reference: Reference) -> None:
    answers = _answers(plain, ASKED)
    for question, answer in zip(ASKED, answers, strict=True):
        if isinstance(question, LogLikelihood):
            ids = reference.ids(question.context.rstrip())
            blanks = question.context[len(question.context.rstrip()) :]
            theirs = [reference.logprob(ids, reference.ids(blanks + text)) for text in question.continuations]
            assert answer.raw == pytest.approx(theirs, abs=BAR)
        else:
            ids = reference.ids(question.prompt)[-(POSITIONS - question.max_new_tokens) :]
            theirs = reference.text(ids, question.max_new_tokens)
            assert answer.raw == (theirs.split("\n")[0] if question.stop else theirs)
    # 800 characters, a token each: 640 positions, of the likelihood's last token none is an input.
    assert [answer.cut_tokens for answer in answers] == [0, 0, 0, 800 + 5 - 641, 800 - 636]


def test_answers_in_a_conversation_begin_the_reply(prompt_reply: EvaluatedModel, reference: Reference) -> None:
    choose, write = ASKED[0], ASKED[1]
    answers = _answers(prompt_reply, [choose, write])
    ids = reference.chat_ids(choose.context)
    # Without the blank that parts them in plain text.
    theirs = [reference.logprob(ids, reference.ids(text.strip())) for text in choose.continuations]
    assert answers[0].raw == pytest.approx(theirs, abs=BAR)
    assert answers[1].raw == reference.text(reference.chat_ids(write.prompt), write.max_new_tokens).split("\n")[0]
    assert prompt_reply.shown("Hi") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_that_thinks_is_read_behind_its_thoughts(
    conversation: EvaluatedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop strings do not end a thought, and the tokenizer knows the marks of thoughts."""
    assert conversation.thinks and not _model(folder, "--hf-chat-template", "--enable-thinking", "false").thinks
    text = "<think>\nOne.\n</think>\n\nTwo."
    seen = []

    def generate(requests, *, batch_size, on_done) -> None:
        seen.extend(requests)
        on_done(0, Completion(token_ids=(1,), text=text, logprobs=(0.0,), finish_reason="stop"))

    monkeypatch.setattr(conversation._lm, "generate", generate)
    (answer,) = _answers(conversation, [ASKED[1]])
    assert answer.raw == text and text[answer.begins_at :] == "Two."
    assert seen[0].stop_strings == ()


@pytest.mark.parametrize("thought", ["", "<think>\nQuestion: what?\n</think>\n\n"])
def test_a_reply_is_cut_where_that_of_other_models_ends(
    conversation: EvaluatedModel, monkeypatch: pytest.MonkeyPatch, thought: str
) -> None:
    """Whether the model has thought or not; a benchmark's reading of the last number would find the second one."""
    text = f"{thought}It is 18.\n#### 18\n\nQuestion: What is 2 + 3?\n#### 5"

    def generate(requests, *, batch_size, on_done) -> None:
        on_done(0, Completion(token_ids=(1,), text=text, logprobs=(0.0,), finish_reason="length"))

    monkeypatch.setattr(conversation._lm, "generate", generate)
    (answer,) = _answers(conversation, [Generate(prompt="Hi", stop=("Question:", "#### 5", ""), max_new_tokens=9)])
    assert answer.raw == f"{thought}It is 18.\n#### 18\n\n"
    assert answer.raw[answer.begins_at :] == "It is 18.\n#### 18\n\n"


@pytest.mark.parametrize(
    ("template", "text", "read"),
    [
        ("", "<think>\nThe answer is A", ""),
        ("", "\n<think>", ""),
        # It has not thought at all.
        ("", "The answer is A", "The answer is A"),
        # The prompt opens the thought.
        ("<think>\n", "The answer is A", ""),
        ("<think>\n", "One.\n</think>\nTwo.", "Two."),
        ("<think>\n\n</think>\n\n", "Two.", "Two."),
    ],
)
def test_a_thought_without_an_end_is_no_answer(
    conversation: EvaluatedModel, monkeypatch: pytest.MonkeyPatch, template: str, text: str, read: str
) -> None:
    ids = conversation.encode("Hi") + conversation._lm.encode(template)
    monkeypatch.setattr(conversation, "_ids", lambda prompt: ids)

    def generate(requests, *, batch_size, on_done) -> None:
        on_done(0, Completion(token_ids=(1,), text=text, logprobs=(0.0,), finish_reason="length"))

    monkeypatch.setattr(conversation._lm, "generate", generate)
    (answer,) = _answers(conversation, [ASKED[1]])
    assert answer.raw == text and text[answer.begins_at :] == read
    assert answer.thought_has_no_end == (read == "")


def test_the_form_of_prompts_is_what_the_flags_say(plain: EvaluatedModel, folder: Path) -> None:
    assert plain.shown("Hi") == "Hi"
    silenced = _model(folder, "--hf-chat-template", "--no-chat-template")
    assert silenced.shown("Hi") == "Hi"
    named = _model(folder, "--prompt-type", "qwen3", "--enable-thinking", "false")
    assert named.shown("Hi").endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    thinking = _model(folder, "--prompt-type", "qwen3")
    # What is in a template decides answers, not its name alone.
    assert named.decisive["chat_template"] == thinking.decisive["chat_template"] == "template qwen3"
    assert named.decisive["asked_as"] != thinking.decisive["asked_as"]
    assert plain.fingerprint == named.fingerprint is not None


def test_a_few_changed_rows_are_another_model(plain: EvaluatedModel, folder: Path, tmp_path: Path) -> None:
    """As of new tokens that were trained alone. The samples of one are not those of the other."""
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][64:90] *= -3
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert _model(other).fingerprint != plain.fingerprint == _model(folder).fingerprint


def test_an_answer_that_leaves_no_room_is_named(plain: EvaluatedModel) -> None:
    with pytest.raises(UserError, match="640 positions, which leave no room for a prompt before an answer of 640"):
        _answers(plain, [Generate(prompt="a", stop=(), max_new_tokens=640)])


def test_what_computes_otherwise_is_another_model(plain: EvaluatedModel, folder: Path, tmp_path: Path) -> None:
    """Though weights are the same. A folder elsewhere is none."""

    def with_fields(name: str, file: str, fields: dict) -> EvaluatedModel:
        other = Path(shutil.copytree(folder, tmp_path / name))
        content = json.loads((other / file).read_text())
        (other / file).write_text(json.dumps(content | fields))
        return _model(other)

    assert with_fields("moved", "config.json", {}).decisive == plain.decisive
    assert plain.decisive["dtype"] == "float32"
    others = {
        "structure": with_fields("eps", "config.json", {"rms_norm_eps": 0.5}),
        "tokenizer": with_fields("words", "tokenizer.json", {"normalizer": {"type": "Lowercase"}}),
        "dtype": _model(folder, "--dtype", "bf16"),
    }
    for name, other in others.items():
        assert other.fingerprint == plain.fingerprint
        assert other.decisive[name] != plain.decisive[name]


def test_arguments_that_leave_the_weights_as_they_are() -> None:
    """Of the Megatron backend flags decide what is computed; those that spread it over ranks do not."""
    lm = SimpleNamespace(
        backend=SimpleNamespace(dtype=torch.float32), tokenizer=SimpleNamespace(identity=lambda: "x"), stop_ids=[0]
    )
    source = ModelSource(path=Path("x"), kind="mcore", backend="megatron", description="")
    base = ["--load", "x", "--lora-target-modules", "linear_qkv"]

    def of(*flags: str) -> dict:
        return computation(evaluation_arguments([*base, *flags]), source, lm)

    others = ("--rotary-base 500", "--rope-scaling-type yarn", "--lora-alpha 7", "--norm-epsilon 0.1")
    assert len({of(*flags.split())["structure"] for flags in ("", *others)}) == 1 + len(others)
    assert of("--tensor-model-parallel-size", "2", "--padded-vocab-size", "64") == of()
