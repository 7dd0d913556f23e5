"""Section `data`: which records or texts are trained on, and how they become token sequences."""

from dataclasses import dataclass
from typing import Any, Literal

from mindspeed_llm.fsdp2.config.types import NonNegativeFloat, PositiveInt, comma_list
from mindspeed_llm.tasks.preprocess.splits import parse_split

# A record of attributes ({"file_name": ...}), names registered in dataset_info.json (comma separated or as a list).
DatasetChoice = dict[str, Any] | str | list[str]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings of the training and evaluation data."""

    template: str | None = None
    """Name of the chat template. null takes the chat template of the tokenizer, which is an error where it has none."""

    dataset: DatasetChoice | None = None
    """Training data: a mapping such as `{file_name: data.jsonl}`, or names registered in dataset_info.json (comma
    separated, or a list)."""

    eval_dataset: DatasetChoice | None = None
    """Evaluation data, given like `dataset`. Excludes `val_size`."""

    dataset_dir: str = "./configs/fsdp2/data"
    """Folder of dataset_info.json. A relative `file_name` is looked up here first, then in the current folder. A
    relative path starts at the current folder."""

    cutoff_len: PositiveInt = 2048
    """Length of a sequence in tokens: the fixed length of manager `mg`, the upper limit (2 or more) of manager `lf`."""

    train_on_prompt: bool = False
    """Let the tokens of the prompt count in the loss too. Excludes `mask_history`."""

    mask_history: bool = False
    """Of a conversation, let only the last answer count in the loss. Excludes `train_on_prompt`."""

    streaming: bool = False
    """Read records while training instead of before. Needs `training.max_steps`; excludes `max_samples`."""

    buffer_size: PositiveInt = 16384
    """Records that a streamed data set is shuffled within."""

    mix_strategy: Literal["concat", "interleave_under", "interleave_over"] = "concat"
    """Several data sets one after the other, or interleaved until the first (under) or the last (over) is used up."""

    interleave_probs: str | None = None
    """Comma separated probabilities of the data sets, for the interleaving strategies. null: all equal."""

    overwrite_cache: bool = False
    """Build cached data anew even if a matching cache exists."""

    preprocessing_batch_size: PositiveInt = 1000
    """Records that are prepared together; packing fills sequences from one such batch."""

    preprocessing_num_workers: PositiveInt | None = None
    """Processes that tokenise. null: one."""

    max_samples: PositiveInt | None = None
    """Take at most this many records of each data set (manager `mg`: of all texts together)."""

    eval_num_beams: PositiveInt | None = None
    """Beams for generation during evaluation."""

    ignore_pad_token_for_loss: bool = True
    """Leave padding out of the loss."""

    val_size: NonNegativeFloat = 0.0
    """Part of `dataset` that is held out for evaluation: a fraction below 1, or a whole number of samples."""

    eval_on_each_dataset: bool = False
    """Evaluate every evaluation data set on its own instead of all together."""

    packing: bool = False
    """Fill sequences of `cutoff_len` with several samples, which then see each other (unless `neat_packing`)."""

    neat_packing: bool = False
    """Pack without letting samples see each other. Implies `packing`."""

    tool_format: str | None = None
    """Format of tool calls, in place of the template's own."""

    default_system: str | None = None
    """System text for conversations without one, in place of the template's own."""

    enable_thinking: bool | None = True
    """Reasoning templates: true trains on thoughts, also on the empty ones that a template writes where an answer has
    none; false removes thoughts, null keeps them, both with the empty ones in the prompt. Which answers show a
    thought is the template's rule: with qwen3 those after the last question, with qwen3_legacy all."""

    tokenized_path: str | None = None
    """Manager `lf`: folder of tokenised data, read if it has content, written otherwise. Data that other settings made
    are refused."""

    data_shared_file_system: bool = False
    """Manager `lf`: the nodes share their file system, so that rank 0 alone prepares data, not one rank of every
    node."""

    data_manager_type: Literal["lf", "mg"] = "lf"
    """`lf`: records, one sample each (stages sft and pt). `mg`: fixed-length samples cut from joined texts (stage
    pt)."""

    split: str = "100,0,0"
    """Manager `mg`: proportions of the documents for training, evaluation and test."""

    create_attention_mask_in_dataloader: bool = False
    """Manager `mg`: deliver a full attention mask with every sample."""

    no_shared_storage: bool = False
    """Manager `mg`: the nodes do not share storage, so one rank of every node builds the index."""

    dataloader_type: Literal["single"] = "single"
    """Manager `mg`: order of samples; `single` goes once through the shuffled sample index."""

    reset_attention_mask: bool = False
    """Stage pt, manager `mg`: documents within one sample do not see each other. Needs `append_eod`."""

    append_eod: bool = False
    """Stage pt: end every document with the tokenizer's end-of-text token."""

    eval_max_samples: PositiveInt | None = None
    """Evaluate on at most this many samples. null: all."""

    @property
    def has_eval_data(self) -> bool:
        """Whether the settings name evaluation data: `eval_dataset`, `val_size`, or the second part of `split`."""
        if self.eval_dataset is not None or self.val_size > 0:
            return True
        return self.data_manager_type == "mg" and self.split_weights[1] > 0

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """The three numbers of `split`; missing ones are 0. Raises UserError where they are no numbers from 0 on."""
        return parse_split(self.split)


def dataset_names(choice: DatasetChoice | None) -> list[str]:
    """The data set names in `choice`; empty for a mapping or None."""
    if isinstance(choice, str):
        return comma_list(choice)
    return list(choice) if isinstance(choice, list) else []
