"""Section `training`: the optimizer, the schedule, batches, evaluation, logging, saving and profiling."""

from dataclasses import dataclass, field
from typing import Literal

from mindspeed_llm.fsdp2.config.types import (
    Decay,
    IntOrMinusOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Ratio,
    Seed,
    Smoothing,
)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of the training loop."""

    output_dir: str
    """Folder for everything that a run writes: exported model, metrics.jsonl, loss.png, run_config.yaml."""

    deterministic: bool = True
    """Use only deterministic algorithms, so that a run can be repeated bit by bit. Costs some speed."""

    optimizer: Literal["adamw", "fused_adamw", "muon"] = "adamw"
    """`fused_adamw` updates all parameters in fused kernels."""

    lr: NonNegativeFloat = 1e-5
    """Peak learning rate."""

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, on the parameters that `decay_norm_and_bias` names."""

    adam_beta1: Decay = 0.9
    """Decay rate of Adam's first moment."""

    adam_beta2: Decay = 0.95
    """Decay rate of Adam's second moment."""

    adam_epsilon: PositiveFloat = 1e-8
    """Term in Adam's denominator that keeps it away from zero."""

    max_grad_norm: NonNegativeFloat = 1.0
    """Scale gradients down to this norm. 0: do not clip."""

    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    """Course of the learning rate after the warm-up: to `min_lr` along a half cosine, straight to 0, or constant."""

    warmup_ratio: Ratio = 0.03
    """Part of all steps in which the learning rate grows from 0."""

    min_lr: NonNegativeFloat = 1e-6
    """Learning rate at the end of the cosine."""

    num_train_epochs: PositiveFloat = 3.0
    """Passes over the data, fractions included; `max_steps` wins."""

    max_steps: IntOrMinusOne = -1
    """Optimizer steps to train. -1: as many as `num_train_epochs` gives."""

    gradient_accumulation_steps: PositiveInt = 1
    """Micro batches whose gradients are added up for one optimizer step."""

    disable_shuffling: bool = False
    """Manager `lf`: take the samples in their order."""

    seed: Seed = 42
    """Seed of weights, data order and dropout."""

    indexer_loss_coeff: NonNegativeFloat = 1.0
    """Weight of the indexer loss of models with sparse attention (DSA)."""

    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the load balancing loss of mixture-of-experts models. 0: none."""

    save_steps: NonNegativeInt = 500
    """Write a checkpoint every so many steps. 0: none. With this or `save_epochs`, one is also written at the end of
    training and when the run is told to end (SIGTERM)."""

    save_total_limit: NonNegativeInt | None = 3
    """Checkpoints of this run to keep, and exports of `save_hf_at_checkpoints`; older ones are removed. null or 0:
    all."""

    resume_from_checkpoint: str | None = None
    """Checkpoint directory to continue from, or `latest`: the newest one of `output_dir` that is whole (a fresh start
    where there is none). The number of ranks and the sharding may differ from before. null: start anew, with
    checkpoints that `output_dir` holds set aside."""

    logging_steps: PositiveInt = 1
    """Write a log line and a line of metrics.jsonl every so many steps."""

    log_throughput: bool = False
    """Add tokens per second and model FLOPs utilisation to the log line."""

    log_cpu_memory: bool = False
    """Add the host's memory use to the log line."""

    mtp_loss_scaling_factor: NonNegativeFloat = 0.3
    """Weight of the multi-token prediction loss."""

    stage: Literal["pt", "sft", "dpo"] = "sft"
    """`pt`: pre-training on texts. `sft`: fine-tuning on conversations. `dpo`: preference optimisation on pairs of a
    chosen and a rejected reply."""

    dpo_loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """Loss on a pair. `ipo` compares means per token, the others sums."""

    dpo_beta: PositiveFloat = 0.1
    """How strongly a reply's log probability may move away from the reference: less with a larger value."""

    dpo_label_smoothing: Smoothing = 0.0
    """Part of the pairs that are taken to be labelled the wrong way round. Loss `sigmoid` only."""

    pref_ftx: NonNegativeFloat = 0.0
    """Weight of the mean cross entropy per token of the chosen reply that is added to the loss of a pair."""

    ref_model: str | None = None
    """Model directory of the reference, with the vocabulary of the model. null: the model as `model_name_or_path` has
    it; with adapters no second copy is held, since the model without them is just that."""

    calculate_per_token_loss: bool = False
    """Weight every token of the global batch equally."""

    dataloader_num_workers: NonNegativeInt = 0
    """Processes that load data beside training. 0: load in the training process."""

    dataloader_prefetch_factor: PositiveInt | None = None
    """Batches that every loading process keeps ready. Needs `dataloader_num_workers` > 0."""

    dataloader_pin_memory: bool = True
    """Put batches in page-locked memory where the device gains from it."""

    dataloader_persistent_workers: bool = False
    """Keep loading processes alive between epochs. Needs `dataloader_num_workers` > 0."""

    dataloader_drop_last: bool = False
    """Leave out the samples at the very end of the run that do not fill a global batch; epochs follow each other
    without a gap, so that batches run across their ends. false: fill it up with rows that do not count."""

    per_device_train_batch_size: PositiveInt = 8
    """Samples of a micro batch."""

    save_only_model: bool = False
    """Leave the optimizer out of checkpoints."""

    save_async: bool = False
    """Write checkpoints while training goes on."""

    save_epochs: NonNegativeInt = 1
    """Write a checkpoint every so many epochs. 0: none."""

    cpu_mmap_threshold: PositiveInt | None = None
    """On the CPU: give blocks of at least so many bytes back to the system when they are freed (4194304 is a good
    start). Less memory for some speed; null leaves the C library's own rule."""

    save_error: Literal["stop", "continue"] = "stop"
    """What happens when a checkpoint cannot be written: end the run, or report it and train on. Older checkpoints
    stay as they are in both cases."""

    save_hf_at_checkpoints: bool = False
    """Also export the model in Hugging Face format at every checkpoint, to `output_dir/hf/global_step_N`."""

    save_hf_weights: bool = True
    """Export the trained model in Hugging Face format to `output_dir` at the end; with adapters, the adapter in PEFT's
    format."""

    merge_adapter: bool = False
    """With adapters: at every export also write the model with the adapter added to its weights, to the folder `merged`
    beside the adapter's files."""

    profile: bool = False
    """Record a profile with torch's profiler (torch_npu's on Ascend)."""

    profile_step_start: NonNegativeInt = 0
    """First step of the profile, counted from 0."""

    profile_step_end: IntOrMinusOne = -1
    """Step before which the profile ends. -1: at the end of training."""

    profile_ranks: list[int] = field(default_factory=lambda: [-1])
    """Ranks that record. -1: all."""

    profile_level: Literal["level_none", "level0", "level1", "level2"] = "level0"
    """Amount of device detail, from none to all (Ascend)."""

    profile_export_type: Literal["text", "db"] = "text"
    """Format of the recorded files (Ascend)."""

    profile_data_simplification: bool = False
    """Delete raw data once it is evaluated (Ascend)."""

    profile_with_cpu: bool = False
    """Record the host's activity too."""

    profile_with_stack: bool = False
    """Record Python call stacks."""

    profile_with_memory: bool = False
    """Record memory use."""

    profile_record_shapes: bool = False
    """Record the shapes of operator inputs."""

    profile_save_path: str = "./profile"
    """Folder for profiles."""

    eval_steps: NonNegativeInt = 0
    """Evaluate every so many steps. 0: only at the end, where evaluation data is given."""

    eval_on_start: bool = False
    """Evaluate before the first step too."""

    eval_samples: NonNegativeInt = 0
    """At every evaluation let the model answer the first so many prompts of the evaluation data (of each set with
    `data.eval_on_each_dataset`), and append the answers to samples.jsonl in `output_dir`."""

    eval_samples_max_new_tokens: PositiveInt = 64
    """Tokens of such an answer, at most."""

    per_device_eval_batch_size: PositiveInt | None = None
    """Samples of an evaluation batch. null: as `per_device_train_batch_size`."""

    decay_norm_and_bias: bool = False
    """Apply weight decay to all parameters. False leaves out norms and biases, as is usual."""

    hf_export_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Type of the exported weights. null: the type of the source model."""

    hf_shard_size: PositiveInt = 5_000_000_000
    """Largest size in bytes of one exported weight file."""

    stop_on_nonfinite_loss: bool = True
    """End the run with an error when the loss is NaN or infinite."""

    device_peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of one device in `parallel.param_dtype`, for the utilisation figure. null: from the table of known
    devices."""

    tensorboard: bool = True
    """Write TensorBoard events to `output_dir`."""
