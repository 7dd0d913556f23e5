"""Both ways to meet lm-eval at toy size: our scores against its own, and our models under its tasks."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation import lm_eval_adapter
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer
from tests.support.tokenizer_files import byte_level_bpe
from tests.support.tokenizers import CHATML_TEMPLATE
from tests.support.toys import build_toy
from tests.tasks.evaluation import lm_eval_differences, lm_eval_human_eval, lm_eval_parity, own_questions
from tests.tasks.evaluation.execution.test_sandbox import needs_sandbox

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra: eval)")
SUBJECTS = ("anatomy", "virology")
QUESTIONS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy with a tokenizer of byte-level BPE, in Hugging Face's layout."""
    folder = tmp_path_factory.mktemp("lm_eval") / "model"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe("<|im_start|>", "<|im_end|>"), eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = CHATML_TEMPLATE
    tokenizer.save_pretrained(folder)
    toy = build_toy("llama", vocab_size=len(tokenizer), max_position_embeddings=2048, num_hidden_layers=2)
    toy.config.eos_token_id = toy.generation_config.eos_token_id = tokenizer.eos_token_id
    toy.config.bos_token_id = toy.generation_config.bos_token_id = None
    toy.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few questions of each benchmark, in its own layout."""
    folder = tmp_path_factory.mktemp("data")
    for split, count in (("test", QUESTIONS), ("dev", 5)):
        (folder / "mmlu" / split).mkdir(parents=True)
        for subject in SUBJECTS:
            with (folder / "mmlu" / split / f"{subject}_{split}.csv").open("w", newline="") as stream:
                csv.writer(stream).writerows(_choice(subject, split, number) for number in range(count))
    (folder / "gsm8k").mkdir()
    for split, first in (("test", 0), ("train", 10)):
        rows = [
            {"question": f"A fox has {n} dogs. How many are lazy?", "answer": f"All {n}.\n#### {n}"}
            for n in range(first, first + QUESTIONS)
        ]
        (folder / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "bbh").mkdir()
    rows = [{"input": "not " * n + "True is", "target": str(n % 2 == 0)} for n in range(QUESTIONS)]
    (folder / "bbh/boolean_expressions.json").write_text(json.dumps({"examples": rows}))
    return folder


def _choice(subject: str, split: str, number: int) -> list[str]:
    options = [f"the {word}" for word in ("fox", "dog", "señor", "café")]
    return [f"What jumps over {split} {number} in {subject}?", *options, "ABCD"[number % 4]]


@pytest.fixture(scope="module")
def theirs(model: Path) -> Any:
    """lm-eval's model for transformers."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=1)


@pytest.fixture(scope="module")
def ours(model: Path) -> Any:
    """The same weights by way of the adapter."""
    from mindspeed_llm.tasks.inference.load import load_causal_lm

    args = lm_eval_adapter._arguments(["--load", str(model), "--tasks", "any"])
    return lm_eval_adapter.lm_eval_model(load_causal_lm(args), name="toy")


def _counts(found: Iterable[tuple[Any, list, list[str]]]) -> dict[str, int]:
    """Benchmark and whose questions -> number of samples, none of which may differ."""
    counts = {}
    for compared, mine, different in found:
        assert not different
        counts[f"{compared.task} {compared.source}"] = len(mine)
    return counts


def test_scores_are_those_of_lm_eval_sample_by_sample(model: Path, data: Path, tmp_path: Path) -> None:
    tasks = [task for task in lm_eval_parity.TASKS if task != "human_eval"]
    assert _counts(lm_eval_parity.compare(model, data, tmp_path, 2, tasks, max_new_tokens=24)) == {
        **{f"{task} {source}": 4 for task in ("mmlu_ppl", "mmlu") for source in ("own", "data")},
        **{f"{task} data": 2 for task in ("gsm8k", "bbh")},
        **{f"{task} own": 4 for task in ("ceval", "cmmlu")},
        **{f"{task} own": 2 for task in ("hellaswag", "boolq")},
        "agieval own": 15,  # of eight subjects, one with a single question
    }


@needs_sandbox
def test_programs_are_those_of_lm_eval(model: Path, data: Path, tmp_path: Path) -> None:
    found = lm_eval_parity.compare(model, data, tmp_path, 2, ["human_eval"], max_new_tokens=12)
    assert _counts(found) == {"human_eval own": 2}


def test_programs_are_judged_by_running_them(tmp_path: Path) -> None:
    own_questions.write_human_eval(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "HumanEval.jsonl").read_text(encoding="utf-8").splitlines()]
    tests = [f"{row['test']}\ncheck({row['entry_point']})" for row in rows]
    right = [[row["prompt"] + row["canonical_solution"]] for row in rows]
    assert lm_eval_human_eval.pass_at_k(tests, right, [1]) == {"pass@1": 1.0}
    wrong = [[f"{rows[0]['prompt']}    return b"], ["def double("]]
    assert lm_eval_human_eval.pass_at_k(tests[:3], [*wrong, right[2]], [1]) == {"pass@1": 1 / 3}
    assert not lm_eval_human_eval.runs("file = open('made', 'w'); file.write('text'); file.flush()")


def test_conversations_are_scored_as_lm_eval_does(model: Path, tmp_path: Path) -> None:
    found = list(lm_eval_parity.compare(model, tmp_path, tmp_path, 1, ["mmlu"], is_chat=True))
    assert _counts(found) == {"mmlu own": 2}
    assert all("<|im_start|>assistant" in sample["prompt"] for _, mine, _ in found for sample in mine)


@pytest.mark.parametrize(
    ("task", "changes", "said"),
    [
        ("boolq", {"doc_to_text": "{{passage}}\nQuestion: {{question}}?\nAnswer: "}, "prompt"),
        ("hellaswag", {"doc_to_choice": "{{choices | reverse | list}}"}, "choices, numbers"),
        ("agieval", {"process_docs": "!function changes.other_gold"}, "gold"),
        ("cmmlu", {"description": ""}, "prompt"),
        (
            "mmlu",
            {
                "filter_list": [
                    {"name": "get_response", "filter": [{"function": "lowercase"}, {"function": "take_first"}]}
                ]
            },
            "reading",
        ),
    ],
)
def test_the_comparison_sees_another_task_file(
    model: Path, theirs: Any, tmp_path: Path, task: str, changes: dict, said: str
) -> None:
    (compared,) = lm_eval_parity.prepare(tmp_path, tmp_path, [task])
    name = next(iter(compared.names.values()))
    file = compared.folder / "tasks" / f"{name}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    file.write_text(
        # The only function has no quotes around it.
        yaml.safe_dump({**content, **changes}).replace("'!function changes.other_gold'", "!function changes.other_gold")
    )
    (file.parent / "changes.py").write_text(
        "def other_gold(rows):\n    return rows.map(lambda row: {'gold': [(row['gold'][0] + 1) % 4]})\n"
    )
    mine = lm_eval_parity.ours(compared, model, 1)
    other = lm_eval_parity.theirs(compared, theirs, 1)
    found = list(lm_eval_differences.differences(compared.task, compared.names, mine, other))
    assert found
    assert said in found[0]


def test_the_comparison_sees_what_differs() -> None:
    mine = [
        {
            "subject": "gsm8k",
            "index": n,
            "prompt": "Q",
            "raw": "7",
            "extracted": {"a": "7"},
            "gold": "7",
            "correct": {"a": True},
        }
        for n in range(4)
    ]
    other = [
        {
            "doc_id": n,
            "filter": "a",
            "arguments": [("Q", {})],
            "resps": [["7"]],
            "filtered_resps": ["7"],
            "target": "7",
            "exact_match": 1.0,
        }
        for n in range(4)
    ]
    differences = partial(lm_eval_differences.differences, "gsm8k", {"gsm8k": "local_gsm8k"})
    assert not list(differences(mine, {"local_gsm8k": other}))
    other[0]["resps"], other[1]["exact_match"], other[3]["arguments"] = [["8"]], 0.0, [("Q?", {})]
    found = list(differences(mine, {"local_gsm8k": other}))
    assert [line.split(": ")[1] for line in found] == ["other text", "other verdict", "other prompt"]
    assert "other samples were asked" in "".join(differences(mine[1:], {"local_gsm8k": other}))


@pytest.mark.parametrize(
    ("values", "is_chat", "said"),
    [
        ([-1.0, -2.0], False, ""),
        ([-1.5, -2.5], False, "other numbers"),
        ([-1.5, -2.5], True, ""),
        ([-1.5, -2.6], True, "other numbers"),
    ],
)
def test_what_all_choices_have_in_addition_counts_but_in_conversations(
    values: list[float], is_chat: bool, said: str
) -> None:
    mine = {"subject": "boolq", "index": 0, "prompt": "Q", "raw": [-1.0, -2.0], "choices": ["no", "yes"]}
    mine |= {"gold": "no", "correct": {"acc": True, "acc_norm": False}}
    other = {
        "doc_id": 0,
        "filter": "none",
        "arguments": [("Q", " no"), ("Q", " yes")],
        "resps": [[(value, False)] for value in values],
        "target": 0,
        "acc": 1.0,
        "acc_norm": 0.0,
    }
    found = lm_eval_differences.differences("boolq", {"boolq": "local"}, [mine], {"local": [other]}, is_chat=is_chat)
    assert [line.split(": ")[1] for line in found] == ([said] if said else [])


def _instances(kind: str, *arguments: tuple) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=number) for number, each in enumerate(arguments)]


def _assert_near(mine: Sequence[tuple[float, bool]], other: Sequence[tuple[float, bool]]) -> None:
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in other]
    assert [value for value, _ in mine] == pytest.approx([value for value, _ in other], abs=1e-4)


def test_likelihoods_are_those_of_lm_evals_model(ours, theirs) -> None:
    asked = [("The quick", " brown fox"), ("The quick ", "brown"), ("", "lazy dog"), ("It" * 3000, " is there")]
    asked += [(f"We've seen {word} go.\nAnswer:", f" {letter}") for word in ("it", "señor") for letter in "AB"]
    _assert_near(
        ours.loglikelihood(_instances("loglikelihood", *asked)),
        theirs.loglikelihood(_instances("loglikelihood", *asked), disable_tqdm=True),
    )
    texts = [("The quick brown fox jumps over the lazy dog.",), ("naïve café, señor! " * 200,), ("it",)]
    mine = ours.loglikelihood_rolling(_instances("loglikelihood_rolling", *texts))
    other = theirs.loglikelihood_rolling(_instances("loglikelihood_rolling", *texts), disable_tqdm=True)
    assert mine == pytest.approx(other, abs=2e-3)  # sums over up to 3000 tokens


def test_texts_are_those_of_lm_evals_model(ours, theirs) -> None:
    options = [
        {"until": ["e", "\n"], "do_sample": False, "max_gen_toks": 12},
        {"until": "the", "max_gen_toks": 16, "temperature": 0.0},
        {"max_gen_toks": 5},
    ]
    asked = [(text, each) for text in ("The quick", "We've seen it " * 300) for each in options]
    assert ours.generate_until(_instances("generate_until", *asked)) == theirs.generate_until(
        _instances("generate_until", *asked), disable_tqdm=True
    )
    drawn = {"do_sample": True, "temperature": 1.0, "top_k": 20, "max_gen_toks": 8, "until": []}
    twice = [ours.generate_until(_instances("generate_until", ("The", drawn), ("The", drawn))) for _ in range(2)]
    assert twice[0] == twice[1]
    assert twice[0][0] != twice[0][1]
    with pytest.raises(UserError, match="the task generates with num_beams=3, which is not known here"):
        ours.generate_until(_instances("generate_until", ("The", {"num_beams": 3})))
    for wrong in ({"temperature": 1e-38}, {"temperature": 0.0}, {"repetition_penalty": 1e-39}):
        with pytest.raises(UserError, match=r"generation_kwargs of the task: .* expected a number from"):
            ours.generate_until(_instances("generate_until", ("The", {"do_sample": True, **wrong})))
    with pytest.raises(UserError, match="answers of 4000 tokens, and the model has 2048 positions"):
        ours.generate_until(_instances("generate_until", ("The", {"max_gen_toks": 4000})))


def test_conversations_are_those_of_lm_evals_model(ours, theirs) -> None:
    talk = [{"role": "user", "content": "Who jumps?"}]
    begun = [*talk, {"role": "assistant", "content": "The fox"}]
    assert ours.apply_chat_template(talk) == theirs.apply_chat_template(talk)
    assert ours.apply_chat_template(begun, add_generation_prompt=False) == theirs.apply_chat_template(
        begun, add_generation_prompt=False
    )
    assert ours.chat_template(True) == theirs.chat_template(True) == CHATML_TEMPLATE


@pytest.mark.parametrize("value", [True, False])
def test_templates_are_told_whether_to_think(model: Path, theirs, value: bool) -> None:
    from lm_eval.models import utils
    from lm_eval.models.huggingface import HFLM

    other = HFLM(pretrained=theirs.model, tokenizer=str(model), enable_thinking=value, think_end_token="</think>")
    template = "{{ messages[0]['content'] }} {{ enable_thinking is defined and enable_thinking }}"
    other.tokenizer.chat_template = template
    tokenizer = as_tokenizer(PreTrainedTokenizerFast.from_pretrained(model, chat_template=template))
    text = "<think>A fox.</think>\n\nThe</think> dog"
    lm = SimpleNamespace(
        tokenizer=tokenizer,
        max_length=2048,
        request=lambda ids, **_: ids,
        generate=lambda part: [SimpleNamespace(text=text) for _ in part],
        backend=SimpleNamespace(replica=0, replicas=1),
    )
    mine = lm_eval_adapter.lm_eval_model(lm, name="toy", enable_thinking=value)
    talk = [{"role": "user", "content": "Who jumps?"}]
    assert mine.apply_chat_template(talk) == other.apply_chat_template(talk) == f"Who jumps? {value}"
    read = utils.postprocess_generated_text(text, [], "</think>" if value else None)
    assert mine.generate_until(_instances("generate_until", ("Who?", {"until": ["."]}))) == [read]


def test_copies_of_a_model_share_the_work(monkeypatch) -> None:
    monkeypatch.setattr(lm_eval_adapter, "_BLOCK", 3)
    told: list[Any] = []
    asked: list[list[int]] = []

    class Ranks:
        def gather_everywhere(self, value: Any) -> list[Any]:
            told.append(value)
            return told

    def work(part: Sequence[int]) -> list[str]:
        asked.append(list(part))
        return [str(item) for item in part]

    for replica in range(3):  # the last to come finds what all others have told
        lm = SimpleNamespace(backend=SimpleNamespace(replica=replica, replicas=3))
        if replica < 2:
            with pytest.raises(KeyError):
                lm_eval_adapter._shared_out(range(11), work, lm, Ranks())
        else:
            assert lm_eval_adapter._shared_out(range(11), work, lm, Ranks()) == [str(item) for item in range(11)]
    assert asked == [[0, 1, 2], [9, 10], [3, 4, 5], [6, 7, 8]]


def test_the_command(model: Path, data: Path, tmp_path: Path, capsys) -> None:
    """The tables, and files with the samples; `--include_path` as lm-eval spells it."""
    from benchmarks import lm_eval_tasks

    lm_eval_tasks.write_mmlu(data / "mmlu", tmp_path / "tasks")
    output = tmp_path / "found"
    flags = ["--load", str(model), "--tasks", "local_mmlu_anatomy", "--include_path", str(tmp_path / "tasks")]
    flags += ["--limit", "2", "--num-fewshot", "1", "--hf-chat-template", "--output-dir", str(output)]
    assert lm_eval_adapter.main(flags) == 0
    assert "|anatomy|" in capsys.readouterr().out
    samples = [json.loads(line) for line in (output / "samples_local_mmlu_anatomy.jsonl").read_text().splitlines()]
    assert [sample["doc_id"] for sample in samples] == [0, 1]
    assert all("<|im_start|>assistant" in sample["arguments"][0][0] for sample in samples)
    found = json.loads((output / "results.json").read_text())["results"]["local_mmlu_anatomy"]
    assert found["acc,none"] == sum(sample["acc"] for sample in samples) / 2


def test_the_benchmark_runs(model: Path, data: Path, monkeypatch, capsys) -> None:
    """What it measures is not looked at."""
    from benchmarks import evaluate

    words = ["--model", str(model), "--data", str(data), "--rounds", "1", "--each", "2", "--answers", "2"]
    monkeypatch.setattr(sys, "argv", ["evaluate", *words, "--parts", "mmlu", "gsm8k"])
    evaluate.main()
    printed = capsys.readouterr().out
    assert "4 questions, largest difference of a log-probability" in printed
    assert "2 answers, 2 the same" in printed
    assert len(re.findall(r"^(mmlu|gsm8k), speed by (clock|processor): median \d", printed, re.MULTILINE)) == 4


@pytest.mark.long
def test_the_benchmark_of_commands_runs(model: Path, data: Path, monkeypatch, capsys) -> None:
    from benchmarks import evaluate

    words = ["--model", str(model), "--data", str(data), "--rounds", "1", "--questions", "2", "--parts", "command"]
    monkeypatch.setattr(sys, "argv", ["evaluate", *words])
    evaluate.main()
    assert "2 questions of anatomy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--tasks is missing"),
        (["--tasks", "a", "--apply_chat_template"], "--hf-chat-template does that here"),
        (["--tasks", "a", "--include-path", "/nowhere"], "--include-path /nowhere is no folder"),
        (["--tasks", "a", "--load", "/nowhere"], "--load /nowhere does not exist"),
        (["--tasks", "a", "--prompt-type", "qwen"], "give --hf-chat-template instead"),
        (["--taks", "a"], "--tasks"),
    ],
)
def test_mistakes_are_named(flags: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        lm_eval_adapter.main(flags)
    assert said in str(caught.value)


def test_a_task_that_is_not_there_is_named(data: Path, tmp_path: Path, monkeypatch) -> None:
    import lm_eval.tasks

    # lm-eval's own files are many, and none of them has the name.
    manager = lm_eval.tasks.TaskManager
    monkeypatch.setattr(
        lm_eval.tasks,
        "TaskManager",
        lambda include_path, **_: manager(include_path=include_path, include_defaults=False),
    )
    with pytest.raises(UserError, match="--tasks names nothing, which lm-eval does not have"):
        lm_eval_adapter._task_manager(["nothing"], str(tmp_path))


def test_without_lm_eval_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"lm-eval is not installed; .*pip install mindspeed_llm\[eval\]"):
        lm_eval_adapter.main(["--tasks", "a"])


def test_reading_flags_needs_neither_lm_eval_nor_torch() -> None:
    code = (
        "import sys; from mindspeed_llm.tasks.evaluation import lm_eval_adapter as adapter\n"
        "adapter._arguments(['--tasks', 'a'])\n"
        "assert not {'lm_eval', 'torch', 'transformers'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
