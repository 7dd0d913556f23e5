"""`training.eval_samples`: the prompts of a run, and the model that answers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.data.data_factory import DataBundle
from mindspeed_llm.fsdp2.data.renderers import chosen_template
from mindspeed_llm.tasks.inference import eval_samples as inference
from mindspeed_llm.tasks.inference.greedy import NO_TOKEN, padded
from mindspeed_llm.tasks.inference.stopping import as_ids, stop_ids
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer


class ModelNextTokens:
    """Finds next tokens, see `tasks.inference.greedy.NextTokens`. All ranks compute the same rows, since each has a
    share of the weights, and take what the first one finds: in low precision others may round differently.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, *, micro_batch_size: int) -> None:
        self._model, self._device, self._size = model, device, micro_batch_size

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """See `NextTokens`."""
        found = []
        for first in range(0, len(rows), self._size):
            part = rows[first : first + self._size]
            # Without a mask: attention is causal, so that nothing sees the padding behind it.
            ids = padded(part, max(map(len, part))).to(self._device)
            logits = self._model(input_ids=ids, use_cache=False).logits
            last = torch.tensor([len(row) - 1 for row in part], device=self._device)
            values, best = logits[torch.arange(len(part), device=self._device), last].max(dim=-1)
            found.append(best.masked_fill(~values.isfinite(), NO_TOKEN))
        # On the CPU: the group has a backend for it beside the device's.
        tokens = torch.cat(found).cpu()
        dist.broadcast(tokens, src=0)
        return tokens.tolist()


def build_eval_samples(
    config: Config, model: PreTrainedModel, tokenizer: Any, data: DataBundle, *, device: torch.device
) -> inference.EvalSamples | None:
    """What is asked at each evaluation; None where nothing is.

    Raises:
        UserError: the evaluation data have no prompt, or there are none.
    """
    training = config.training
    if not training.eval_samples:
        return None
    words: tuple[str, ...] = ()
    if training.stage != "pt":
        template = chosen_template(config.data, tokenizer)
        words = () if template is None else template.stop_words
    generation = model.generation_config
    others = as_ids(None if generation is None else generation.eos_token_id)
    stops = stop_ids(as_tokenizer(tokenizer), words, others)
    sets = {} if data.eval is None else data.eval if isinstance(data.eval, dict) else {None: data.eval}
    samples = inference.build_eval_samples(
        {name: source.texts() for name, source in sets.items()},
        training.eval_samples,
        tokenizer=as_tokenizer(tokenizer),
        stop_ids=stops,
        next_tokens=ModelNextTokens(
            model,
            device,
            micro_batch_size=training.per_device_eval_batch_size or training.per_device_train_batch_size,
        ),
        modules=[model],
        max_new_tokens=training.eval_samples_max_new_tokens,
        max_length=config.data.cutoff_len,
    )
    if samples is None:
        problem = f"no sample of it has a prompt and a target within data.cutoff_len = {config.data.cutoff_len}"
        raise UserError(
            f"training.eval_samples = {training.eval_samples} asks prompts of the evaluation data, but "
            f"{problem if sets else 'there is none'}; set data.eval_dataset or data.val_size, or leave it out"
        )
    return samples
