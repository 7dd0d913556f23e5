"""lm-eval's own client for completions, as it is: what it scores and generates through the endpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.tokenizers import chatml_tokenizer
from tests.tasks.inference.serve.serving import MODEL, generated, serving, toy_lm

PAIRS = [
    ("The capital of France is", " Paris"),
    ("2 + 2 =", " 4"),
    ("世", "界 and more"),
    ("a" * 90, "b" * 40),
    ("Once upon a time", ""),
]


@pytest.mark.parametrize("num_concurrent", [1, 3])
def test_lm_eval_scores_and_generates(num_concurrent: int, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is in the extra eval")
    pytest.importorskip("tenacity", reason="lm-eval asks servers with it")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    lm = toy_lm()
    chatml_tokenizer().save_pretrained(tmp_path)
    expected = []
    for context, rest in PAIRS[:-1]:
        ids, before = lm.encode(context + rest), len(lm.encode(context))
        logits = lm.backend.model(torch.tensor([ids])).logits[0, before - 1 : -1].log_softmax(dim=-1)
        own = torch.tensor(ids[before:])
        greedy = bool((logits.argmax(dim=-1) == own).all())
        expected.append((logits.gather(1, own[:, None]).sum().item(), greedy))
    prompt = PAIRS[0][0]
    best = lm.decode(generated(lm, lm.encode(prompt), 20))
    stop = next(letter for letter in best[3:] if letter.isascii())
    # What the model says itself is greedy, where it can be written as text.
    context, said = next(
        (context, said)
        for context in map(chr, range(ord("A"), ord("z")))
        if (said := lm.decode(generated(lm, lm.encode(context), 1))).isascii() and said
    )
    with serving(lm) as service:
        client = LocalCompletionsAPI(
            model=MODEL,
            base_url=f"{service.url}/completions",
            tokenizer_backend="huggingface",
            tokenizer=str(tmp_path),
            batch_size=1 if num_concurrent > 1 else 2,
            num_concurrent=num_concurrent,
            max_length=lm.max_length,
            max_retries=1,
        )
        requests = [*PAIRS[:-1], (context, said)]
        found = client.loglikelihood(
            [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(requests)], disable_tqdm=True
        )
        asked = [(prompt, {"until": until, "max_gen_toks": 20}) for until in (["never said"], [stop])]
        texts = client.generate_until(
            [Instance("generate_until", {}, row, number) for number, row in enumerate(asked)], disable_tqdm=True
        )
    assert [is_greedy for _, is_greedy in found] == [greedy for _, greedy in expected] + [True]
    assert [logprob for logprob, _ in found[:-1]] == pytest.approx([logprob for logprob, _ in expected], abs=1e-4)
    assert texts == [best, best[: best.index(stop)]]
