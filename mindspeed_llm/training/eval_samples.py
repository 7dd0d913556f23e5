"""--eval-samples: the prompts of a run on the Megatron backend, and the model that answers them."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference import eval_samples as inference
from mindspeed_llm.tasks.inference.stopping import of_generation_config, stop_ids
from mindspeed_llm.training.data.datasets import Datasets
from mindspeed_llm.training.data.tokens import named_tokenizer
from mindspeed_llm.training.next_tokens import PipelineNextTokens
from mindspeed_llm.training.setup import TrainingModel


def build_eval_samples(args: Namespace, model: TrainingModel, data: Datasets) -> inference.EvalSamples | None:
    """What is asked at each evaluation; None where nothing is.

    Raises:
        UserError: the validation data have no prompt, or there are none.
    """
    if not args.eval_samples:
        return None
    tokenizer = named_tokenizer(args)
    assert tokenizer is not None, "validation lets no --eval-samples without tokenizer pass"
    folder = args.tokenizer_name_or_path
    stops = stop_ids(tokenizer, data.stop_words, of_generation_config(Path(folder) if folder else None))
    samples = inference.build_eval_samples(
        {None: data.valid_texts},
        args.eval_samples,
        tokenizer=tokenizer,
        stop_ids=stops,
        next_tokens=PipelineNextTokens(model, args),
        modules=model.chunks,
        max_new_tokens=args.eval_samples_max_new_tokens,
        max_length=args.seq_length,
    )
    if samples is None:
        problem = (
            f"no sample of the validation data has a prompt and a target within --seq-length {args.seq_length} tokens"
            if data.valid is not None
            else "there are no validation data"
        )
        raise UserError(
            f"--eval-samples {args.eval_samples} asks prompts of the validation data, but {problem}; give others "
            "(--split, --valid-data-path), or leave it out"
        )
    return samples
