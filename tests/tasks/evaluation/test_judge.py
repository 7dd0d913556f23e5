"""What is warned of beside the scores."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_llm.tasks.evaluation import judge
from mindspeed_llm.tasks.evaluation.benchmark import Benchmark
from mindspeed_llm.tasks.evaluation.benchmarks import boolq, mmlu, needlebench
from mindspeed_llm.tasks.evaluation.requests import Answer
from tests.tasks.evaluation.data import write_mmlu


@pytest.mark.parametrize(
    ("benchmark", "advice"),
    [
        (mmlu.MMLU, "Fewer examples (--num-fewshot) make them shorter."),
        (needlebench.BENCHMARK, "Shorter answers (--max-new-tokens) leave more room for them."),
        (boolq.BENCHMARK, "Those questions are too long for this model."),
    ],
)
def test_advice_for_cut_prompts_is_what_the_benchmark_takes(benchmark: Benchmark, advice: str) -> None:
    metric = benchmark.headline
    sample = judge.SampleResult(
        subject="s", index=0, prompt="", raw="", extracted={metric: ""}, gold="", correct={metric: False}, cut_tokens=1
    )
    (warning,) = judge.summarise(benchmark, [sample]).warnings
    assert warning.startswith(f"{benchmark.name}: 1 of 1 prompts were longer") and warning.endswith(advice)


def test_thoughts_without_an_end_are_wrong_and_counted(tmp_path: Path) -> None:
    subject = mmlu.MMLU.load(write_mmlu(tmp_path))[0]
    document = subject.documents[0]
    right = f"The answer is {mmlu.MMLU.target(document.fields)}"
    answers = [Answer(raw=right), Answer(raw=right, begins_at=len(right), thought_has_no_end=True)]
    samples = [judge.judge(mmlu.MMLU, subject, document, "", answer) for answer in answers]
    assert [sample.correct["letter"] for sample in samples] == [True, False]
    (warning,) = judge.summarise(mmlu.MMLU, samples).warnings
    assert "1 of 2 answers ended while the model was still thinking" in warning
