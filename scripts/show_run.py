"""Print what a finished run achieved: eval loss before and after, the loss curve, and what its model says.

    python scripts/show_run.py output/quickstart/run --prompt 'The "for" statement is used to'
    python scripts/show_run.py output/soak/sft_smollm2/run --chat "Name three primary colours." --require-improvement

Reads metrics.jsonl of the run and loads the exported model from the same directory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


class RunError(RuntimeError):
    """The run's files do not show what was asked for; the message says which file and why."""


def read_evaluations(run: Path) -> list[dict[str, Any]]:
    """Return every evaluation in the run's metrics.jsonl, in the order written.

    Raises:
        RunError: no such file, or fewer than two evaluations in it.
    """
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise RunError(f"{metrics} does not exist: the run has not logged anything")
    from mindspeed_llm.observability.metrics_file import read_metrics

    found = [record for record in read_metrics(metrics) if "eval_loss" in record]
    if len(found) < 2:
        raise RunError(f"{metrics} holds {len(found)} evaluations; two are needed (training.eval_on_start: true)")
    return found


def _where(evaluation: dict[str, Any]) -> str:
    """Not all losses have a perplexity."""
    text = f"iteration {evaluation['iteration']}"
    return text + (f", perplexity {evaluation['eval_perplexity']:.2f}" if "eval_perplexity" in evaluation else "")


def generate(directory: Path, *, prompt: str | None, chat: str | None, max_new_tokens: int) -> str:
    """Greedy continuation of ``prompt``, or the answer to ``chat`` under the model's own chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if chat is not None:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": chat}], tokenize=False, add_generation_prompt=True
        )
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=chat is None)
    with torch.no_grad():
        output = model.generate(**encoded, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output[0, encoded.input_ids.shape[1] :], skip_special_tokens=True)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="training.output_dir of the run")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", help="text that the trained model continues")
    text.add_argument("--chat", help="question that the trained model answers")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--require-improvement", action="store_true", help="fail unless the last eval loss is lower")
    options = parser.parse_args(argv)
    try:
        evaluations = read_evaluations(options.run)
        first, last = evaluations[0], evaluations[-1]
        before, after = first["eval_loss"], last["eval_loss"]
        plot = options.run / "loss.png"
        if not plot.is_file():
            raise RunError(f"{plot} does not exist")
        if not (options.run / "config.json").is_file():
            raise RunError(f"{options.run} holds no exported model (config.json)")
        print(f"eval loss before  {before:.4f}  ({_where(first)})")
        print(f"eval loss after   {after:.4f}  ({_where(last)})")
        print(f"loss curve        {plot}")
        print(f"trained model     {options.run}  (Hugging Face directory)")
        asked = options.prompt if options.chat is None else options.chat
        if asked is not None:
            answer = generate(
                options.run, prompt=options.prompt, chat=options.chat, max_new_tokens=options.max_new_tokens
            )
            print(f"prompt            {asked}")
            print(f"{'completion' if options.chat is None else 'answer':18}{answer.strip()}")
            if not answer.strip():
                raise RunError(f"{options.run}: the exported model answers nothing")
        if options.require_improvement and not after < before:
            raise RunError(f"the eval loss did not fall: {before:.4f} -> {after:.4f}")
    except RunError as error:
        print(f"show_run.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
