"""Checks of section `data`, alone and against the other sections. Files are not opened here."""

from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.config.data_config import DatasetChoice, dataset_names
from mindspeed_llm.fsdp2.config.types import comma_list


def check_data(config: Config) -> None:
    """Raise `UserError` where fields of section `data` disagree with each other or with `training`."""
    data = config.data
    if data.dataset is None and (data.tokenized_path is None or data.data_manager_type == "mg"):
        raise UserError(
            "data.dataset is not set. Expected a mapping such as {file_name: data.jsonl}, or names registered in "
            f"{data.dataset_dir}/dataset_info.json"
        )
    _check_choice("data.dataset", data.dataset)
    _check_choice("data.eval_dataset", data.eval_dataset)
    _check_manager(config)
    if data.cutoff_len < 2 and data.data_manager_type == "lf":
        raise UserError(
            f"data.cutoff_len = {data.cutoff_len} leaves nothing to learn: the first token of a sample is never "
            "predicted. Expected 2 or more."
        )
    _check_split(config)
    _check_mixture(config)
    _check_evaluation(config)
    if data.streaming:
        _check_streaming(config)
    if config.training.stage == "dpo":
        _check_pairs(config)
    if data.train_on_prompt and data.mask_history and config.training.stage == "sft":
        raise UserError(
            "data.train_on_prompt = true and data.mask_history = true disagree: the one trains on prompts, the other "
            "on the last answer only. Set one of them to false."
        )
    if data.reset_attention_mask and config.training.stage == "pt" and not data.append_eod:
        raise UserError(
            "data.reset_attention_mask = true and data.append_eod = false disagree: documents are told apart by the "
            "end-of-text token. Set data.append_eod to true."
        )


def data_notices(config: Config) -> list[str]:
    """Lines about fields of section `data` that say less, or more, than they seem to."""
    data = config.data
    if data.data_manager_type == "mg":
        return []
    notices = []
    if data.mix_strategy != "concat" and data.dataset is not None and _num_datasets(data.dataset) == 1:
        notices.append(f"no effect from data.mix_strategy = {data.mix_strategy}: data.dataset is one data set")
    if data.neat_packing and not data.packing:
        notices.append("data.neat_packing = true packs samples, whatever data.packing says (false)")
    return notices


def _check_choice(field: str, choice: DatasetChoice | None) -> None:
    if choice is not None and not choice:
        raise UserError(f"{field} is empty. Expected a mapping such as {{file_name: data.jsonl}}, or names.")
    if not all(dataset_names(choice)):
        raise UserError(f"{field} = {choice!r} has an empty name between its commas")


def _check_manager(config: Config) -> None:
    if config.data.data_manager_type == "mg" and config.training.stage != "pt":
        raise UserError(
            f"training.stage = {config.training.stage} and data.data_manager_type = mg disagree: mg cuts joined texts "
            "into samples of one length, so it knows no prompts and answers. Use data.data_manager_type "
            "lf, or training.stage pt."
        )
    if config.data.data_manager_type == "mg" and config.data.val_size > 0:
        raise UserError(
            f"data.val_size = {config.data.val_size:g} and data.data_manager_type = mg disagree: mg takes its "
            "evaluation part from data.split, such as 95,5,0."
        )


def _check_split(config: Config) -> None:
    try:
        first, _, _ = config.data.split_weights
    except UserError as error:
        raise UserError(f"data.{error}") from error
    if first == 0:
        raise UserError(f"data.split = {config.data.split!r} leaves nothing for training; its first number must be > 0")


def _check_mixture(config: Config) -> None:
    data = config.data
    if data.interleave_probs is None:
        return
    if data.mix_strategy == "concat":
        raise UserError(
            f"data.interleave_probs = {data.interleave_probs!r} and data.mix_strategy = concat disagree: "
            "probabilities belong to interleave_under or interleave_over"
        )
    try:
        probabilities = [float(item) for item in comma_list(data.interleave_probs)]
    except ValueError:
        probabilities = []
    if not probabilities or not all(0 < probability <= 1 for probability in probabilities):
        raise UserError(
            f"data.interleave_probs = {data.interleave_probs!r} is not a list of probabilities above 0, such as 0.7,0.3"
        )
    count = _num_datasets(data.dataset)
    if len(probabilities) != count:
        raise UserError(
            f"data.interleave_probs = {data.interleave_probs!r} has {len(probabilities)} probabilities, but "
            f"data.dataset has {count} data set(s); give one for each"
        )
    if abs(sum(probabilities) - 1) > 1e-6:
        raise UserError(
            f"data.interleave_probs = {data.interleave_probs!r} adds up to {sum(probabilities):g}; they must add up to "
            "1"
        )


def _num_datasets(choice: DatasetChoice | None) -> int:
    """The data sets that `choice` names; a mapping may name several files."""
    files = choice.get("file_name") if isinstance(choice, dict) else choice
    if isinstance(files, str):
        return 1 if isinstance(choice, dict) and Path(files).exists() else len(comma_list(files))
    return len(files) if isinstance(files, list) else 1


def _check_evaluation(config: Config) -> None:
    data, training = config.data, config.training
    if data.val_size > 0 and data.eval_dataset is not None:
        raise UserError(
            f"data.val_size = {data.val_size:g} and data.eval_dataset = {data.eval_dataset!r} exclude each other: "
            "evaluation samples come from data.dataset or from a data set of their own. Leave one of them out."
        )
    if data.val_size >= 1 and data.val_size != int(data.val_size):
        raise UserError(
            f"data.val_size = {data.val_size:g} is neither a fraction below 1 nor a whole number of samples"
        )
    if not data.has_eval_data:
        for field, value in (("eval_steps", training.eval_steps), ("eval_on_start", training.eval_on_start)):
            if value:
                source = "data.split" if data.data_manager_type == "mg" else "data.val_size"
                raise UserError(
                    f"training.{field} = {str(value).lower()} needs evaluation data: set data.eval_dataset or {source}"
                )


def _check_pairs(config: Config) -> None:
    data, training = config.data, config.training
    for field in ("packing", "neat_packing", "streaming", "tokenized_path"):
        if value := getattr(data, field):
            raise UserError(
                f"training.stage = dpo and data.{field} = {str(value).lower() if value is True else repr(value)} "
                "disagree: pairs are read from records into rows of their own. Leave it out."
            )
    if training.dpo_label_smoothing and training.dpo_loss_type != "sigmoid":
        raise UserError(
            f"training.dpo_label_smoothing = {training.dpo_label_smoothing:g} and training.dpo_loss_type = "
            f"{training.dpo_loss_type} disagree: only sigmoid has smooth labels. Set one of them back."
        )


def _check_streaming(config: Config) -> None:
    data = config.data
    if data.data_manager_type == "mg":
        raise UserError(
            "data.streaming = true and data.data_manager_type = mg disagree: mg shuffles an index over all samples. "
            "Use data.data_manager_type lf."
        )
    if data.packing or data.neat_packing:
        raise UserError(
            "data.streaming = true and data.packing (or neat_packing) = true disagree: packing looks at whole batches "
            "of samples. Set one of them to false."
        )
    if data.max_samples is not None:
        raise UserError(
            f"data.streaming = true and data.max_samples = {data.max_samples} disagree: a stream is limited by "
            "training.max_steps"
        )
    if 0 < data.val_size < 1:
        raise UserError(
            f"data.streaming = true and data.val_size = {data.val_size:g} disagree: a stream has no known length to "
            "take a fraction of. Give a whole number of samples."
        )
    if data.tokenized_path is not None:
        raise UserError(
            f"data.streaming = true and data.tokenized_path = {data.tokenized_path!r} disagree: a stream is not kept"
        )
    if config.training.max_steps == -1:
        raise UserError(
            "data.streaming = true needs training.max_steps, which is -1: a stream has no known length, so epochs "
            "cannot be counted"
        )
