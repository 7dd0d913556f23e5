"""Made-up results in the shape of the files that an evaluation writes."""

from __future__ import annotations

import random
from typing import Any

from mindspeed_llm.tasks.evaluation.scores import Score, score, total_score

HOSTILE = "</script><script>document.title = 'taken'</script><b onclick=x>\u2028 & \ud800"


def _shape(found: Score) -> dict[str, Any]:
    return {"correct": found.correct, "total": found.total, "accuracy": found.accuracy, "stderr": found.stderr}


def made_up(seed: int, *, skill: float = 0.5, subjects: int = 5, size: int = 12) -> tuple[dict, list[dict]]:
    """(results.json, rows of samples.jsonl) of a task that chooses and one that writes."""
    draw = random.Random(seed)
    samples: list[dict[str, Any]] = []
    for subject in range(subjects):
        for index in range(size):
            gold = "ABCD"[(subject + index) % 4]
            raw = [
                -1.0 if (letter == gold) == (draw.random() < skill) else -2.0 - place
                for place, letter in enumerate("ABCD")
            ]
            won = "ABCD"[raw.index(max(raw))]
            samples.append(
                {
                    "task": "mmlu",
                    "subject": f"subject_{subject}",
                    "index": index,
                    "prompt": f"Shots of subject {subject}\n\nQuestion {index}?\nAnswer:",
                    "raw": raw,
                    "choices": list("ABCD"),
                    "extracted": {"acc": won},
                    "gold": gold,
                    "correct": {"acc": won == gold},
                }
            )
    for index in range(30):
        number = str(index) if draw.random() < skill else "no idea"
        samples.append(
            {
                "task": "gsm8k",
                "subject": "gsm8k",
                "index": index,
                "prompt": f"Question: what is {index}?\nAnswer:",
                "raw": f" It is {number}. {HOSTILE if index == 3 else ''}",
                "extracted": {"strict": "[invalid]", "flexible": number},
                "gold": str(index),
                "correct": {"strict": False, "flexible": number == str(index)},
            }
        )
    samples[0] |= {"raw": [float("-inf"), -1.0, -1.0, -1.0], "is_tie": True, "cut_tokens": 7}
    results: dict[str, Any] = {"format": 1, "results": {}, "tasks": {}}
    for task, headline in (("mmlu", "acc"), ("gsm8k", "flexible")):
        rows = [row for row in samples if row["task"] == task]
        names = sorted({row["subject"] for row in rows})
        metrics = list(rows[0]["correct"])
        by_subject = {
            name: {m: score([row["correct"][m] for row in rows if row["subject"] == name]) for m in metrics}
            for name in names
        }
        total = {m: total_score([part[m] for part in by_subject.values()]) for m in metrics}
        results["results"][task] = {
            **_shape(total[headline]),
            "metric": headline,
            "metrics": {m: _shape(found) for m, found in total.items()},
            "subjects": {
                name: {**_shape(part[headline]), "metrics": {m: _shape(found) for m, found in part.items()}}
                for name, part in by_subject.items()
            },
            "warnings": ["In 1 of 60 samples all choices were equally likely <b>."] if task == "mmlu" else [],
        }
        results["tasks"][task] = {
            "version": "1",
            "variant": None,
            "num_fewshot": 5,
            "data_hash": "ab",
            "prompts_hash": "cd",
        }
    results["model"] = {
        "description": "hf model in ./model, 135 M parameters",
        "fingerprint": "12",
        "chat_template": None,
    }
    results["flags"] = {"load": "./model <x>", "task": ["mmlu", "gsm8k"]}
    results["versions"] = {"mindspeed_llm": "0.1.0", "torch": "2.13.0"}
    return results, samples
