"""Answers that are shown at evaluations: what they need."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_llm.errors import UserError


def check_eval_samples(args: Namespace) -> None:
    """Check --eval-samples, once `check_data` has said whether there is anything to evaluate on.

    Raises:
        UserError: there are no evaluations, no tokenizer, or no folder.
    """
    if not args.eval_samples:
        return
    flag = f"--eval-samples {args.eval_samples}"
    if not args.eval_iters:
        raise UserError(
            f"{flag} asks the model at every evaluation, but there are none: give validation data (--split, "
            "--valid-data-path) and an --eval-iters above 0, or leave it out"
        )
    if args.tokenizer_type is None:
        raise UserError(f"{flag} writes texts, which needs a tokenizer; give --tokenizer-name-or-path")
    if args.save is None and args.metrics_dir is None:
        raise UserError(f"{flag} writes samples.jsonl beside the metrics; give --metrics-dir or --save a folder")
