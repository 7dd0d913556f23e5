"""Flags and values of the mirrored interface that are refused, each with the reason and, where there is one, a way."""

from __future__ import annotations

_REINFORCED = "reward models and reinforcement learning are not available"
_CUT = "a sample that is too long is cut to --seq-length, or left out where no answer remains; prompts are never cut"
_LORA_MORE = "adapters alone are trained, no modules beside them; leave it out, or train all weights"
_LATENT = "multi-head latent attention is not available yet"
_INDEXER = "the sparse indexer of DeepSeek-V3.2 and its successors is not available yet"
_MTP = "multi-token prediction is not available yet"
_CONTEXT = "context parallelism is not available yet; leave the flag out"
_GENERATE = "it is for generated text: inference.py and evaluation.py take it"
_SWAP = "states and activations stay on the device here; leave the flag out, or use --recompute-granularity full"
_OVERLAP = "communication of experts is not overlapped with computation; leave the flag out, results are the same"
_FAMILY = "it belongs to model families that are not available in this backend yet"
_RECORD = "prepare such data with preprocess_data.py, and name its output with --data-path"
_CONVERT = "write Hugging Face weights with convert_ckpt_v2.py after the run"
_LOW_PRECISION = "training below 16 bits is not available yet"
_WANDB = "runs write metrics.jsonl, loss.png and TensorBoard; leave the flag out"
_TRANSFORMER_ENGINE = "it belongs to Transformer Engine, which is not used"
_HA = "it needs a closed library (mindio_ttp); checkpoints, --exit-duration-in-mins and SIGTERM keep a run's progress"
_KERNEL = "this fused kernel is not available yet; leave the flag out, results are the same"
_TP2D = "tensor parallelism in two dimensions is not available"
_SCHEDULE = "dualpipev and the schedules around it are not available yet; leave the flag out"
_MUON = (
    "momentum no-split-qkv nesterov scale-mode fp32-matmul-prec coefficient-type num-ns-steps tp-mode "
    "extra-scale-factor scalar-optimizer"
)
_LAYOUT = "give uneven stages with --num-layer-list"
_DISAGGREGATED = "layerwise disaggregated training is not available"


def _rows(reason: str, names: str) -> dict[str, str]:
    return {f"--{name}": reason for name in names.split()}


NOT_YET: dict[str, str] = {
    **_rows(_CUT, "no-cut-token"),
    **_rows("training reads token ids and labels alone", "dataset-additional-keys"),
    **_rows(_LORA_MORE, "lora-modules-to-save"),
    **_rows(
        _LATENT,
        "multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim padded-base-length "
        "mla-fa-without-pad mla-mm-split mla-zero-memory mla-up-proj-tp-overlap recompute-mla-up-proj "
        "mla-swap-core-attn-out mla-fa-divide-qk enable-mla-absorb enable-mla-scale-q-lora enable-mla-scale-kv-lora",
    ),
    **_rows(
        _INDEXER,
        "enable-dsa-indexer index-n-heads index-head-dim index-topk indexer-loss-coeff use-fused-lightning-indexer "
        "use-sparse-flash-attn kv-compress compress-ratios index-topk-freq index-topk-pattern index-skip-topk-offset "
        "index-share-for-mtp-iteration indexer-qk-quant-scheme no-use-sparse-c8-indexer apply-rope-no-in-complex "
        "original-seq-len compress-rope-theta rope-theta rope-factor max-batch-size scale-fmt",
    ),
    **_rows(_MTP, "mtp-num-layers mtp-loss-scaling-factor mtp-spec mtp-mem-efficient-logits"),
    **_rows(
        _CONTEXT,
        "cp-window-size attention-mask-type use-cp-send-recv-overlap use-fused-ring-attention-update "
        "megatron-cp-in-bnsd ulysses-degree-in-cp kv-head-repeat-before-uly-alltoall context-parallel-kv-cache-policy "
        "context-parallel-cache-interval use-ulysses-allgather-kv cp-comm-type hierarchical-context-parallel-sizes",
    ),
    **_rows(
        _GENERATE,
        "task top-p top-k temperature max-length max-new-tokens hf-chat-template add-eos-token use-kv-cache "
        "history-turns task-data-path evaluation-batch-size greedy instruction-template no-chat-template eval-language "
        "max-eval-samples broadcast alternative-prompt origin-postprocess chain-of-thought",
    ),
    **_rows(
        _SWAP,
        "swap-attention swap-modules smart-swap swap-layer-input virtual-optimizer swap-optimizer swap-optimizer-times "
        "optimizer-cpu-offload moe-unperm2-mem-optim-swap",
    ),
    **_rows(
        _OVERLAP,
        "moe-alltoall-overlap-comm moe-allgather-overlap-comm moe-alltoall-mc2 moe-fb-overlap moe-zero-memory "
        "moe-zero-memory-num-layers overlap-moe-expert-parallel-comm delay-wgrad-compute",
    ),
    **_rows(_KERNEL, "moe-permute-fusion use-fused-moe-token-permute-and-unpermute use-fusion-attn-v2 use-ascend-mc2"),
    **_rows(
        _FAMILY,
        "embedding-multiplier-scale scale-emb dim-model-base scale-depth output-multiplier-scale input-embeds-norm "
        "add-rmsnorm-offset rmsnorm-weight-in-fp32 input-layernorm-in-fp32 init-norm-weight-in-fp32 post-norm "
        "no-post-layer-norm geglu gelu-tanh swiglu-limit output-logit-softcapping attn-logit-softcapping "
        "query-pre-attn-scalar cla-share-factor share-kvstates add-dense-bias add-output-layer-bias "
        "interleave-sliding-window square-alibi-mask fill-neg-inf alibi-fusion-attn-type long-factor short-factor "
        "long-mscale short-mscale longrope-freqs-type dynamic-factor use-glm-rope full-attention-interval "
        "linear-key-head-dim linear-num-key-heads linear-num-value-heads linear-value-head-dim use-triton-gdn "
        "mamba-d-ssm mamba-chunk-size mamba-d-conv mamba-expand num-zero-experts n-hash-layers "
        "enable-mhc hc-mult hc-sinkhorn-iters hc-eps use-triton-mhc use-fused-mhc o-groups o-lora-rank "
        "sliding-window-size use-triton-swiglu-limit skip-bias-add no-enable-linear-qkv input-jitter fc-type "
        "shared-expert-gate-output-dimension",
    ),
    **_rows(
        "expert losses of each device and each sequence are not available; --moe-router-load-balancing-type "
        "seq_aux_loss balances each sequence",
        "seq-aux moe-device-level-aux-loss-coeff moe-comm-aux-loss-coeff use-global-aux-loss",
    ),
    **_rows(
        "spread whole experts with --expert-tensor-parallel-size 1 and --moe-token-dispatcher-type alltoall",
        "moe-tp-extend-ep moe-extended-tp",
    ),
    **_rows("use --moe-router-dtype fp32", "router-gating-in-fp32 topk-softmax-in-fp32 moe-revert-type-after-topk"),
    **_rows(
        "no model family that is available here has it",
        "rotary-interleaved rotary-seq-len-interpolation-factor squared-relu openai-gelu apply-layernorm-1p "
        "apply-residual-connection-post-layernorm init-method-xavier-uniform apply-query-key-layer-scaling "
        "fp32-residual-connection moe-input-jitter-eps",
    ),
    **_rows("gradients are sums over tokens, which are divided once; leave it out", "ddp-average-in-collective"),
    **_rows(
        "it is done in all layers; leave it out", "recompute-norm-num-layers recompute-activation-function-num-layers"
    ),
    **_rows("each layer's router losses are added up; leave it out", "moe-per-layer-logging"),
    **_rows("weights always start from --seed; leave it out", "no-initialization data-parallel-random-init"),
    **_rows(_SCHEDULE, "schedules-method dualpipev-dw-detach recompute-in-bubble recompute-in-advance"),
    **_rows(
        _LAYOUT,
        "pipeline-num-transformer-layers pipeline-model-parallel-layout decoder-first-pipeline-num-layers "
        "decoder-last-pipeline-num-layers account-for-embedding-in-pipeline-split "
        "account-for-loss-in-pipeline-split",
    ),
    **_rows(
        _TP2D,
        "tp-2d tp-x tp-y enable-overlap-ag-with-matmul enable-overlap-matmul-with-rs "
        "enable-backward-overlap-ag-with-matmul",
    ),
    **_rows(_DISAGGREGATED, "layerwise-disaggregated-training"),
    **_rows(
        _CONVERT,
        "enable-mg2hf-convert only-convert-last-checkpoint mg-save-dir save-layer-by-layer",
    ),
    **_rows(
        _LOW_PRECISION,
        "fp8-format fp8-recipe no-use-gmm-fp8 te-gmm-mode fp8-reuse-quantized-weight qat-scheme qat-quant-block-size "
        "te-comparison-with-cpu te-comparison-with-bf16 quant-states "
        "quant-grads o2-optimizer o2-gradient",
    ),
    **_rows("AdamW is the optimizer; leave the flag out", "optimizer-selection ema-decay apply-wd-to-qk-layernorm"),
    **_rows("the loss is computed at once; leave the flag out", "loss-compute-mode loss-chunk-size"),
    **_rows(_WANDB, "use-wandb wandb-project wandb-exp-name wandb-save-dir"),
    **_rows(
        _TRANSFORMER_ENGINE,
        "tp-comm-overlap tp-comm-overlap-cfg fp8-param-gather use-transformer-engine-op-fuser attention-backend",
    ),
    **_rows(
        _HA,
        "enable-high-availability enable-hbmfault-repair enable-worker-reboot distributed-optimizer-no-replica "
        "enable-elastic-training",
    ),
    **_rows("train with PyTorch's FSDP2 through train_fsdp2.py", "use-torch-fsdp2 fsdp2-config-path"),
    **_rows("models of before megatron-core are not available", "use-legacy-models"),
    **_rows("a batch that grows is not available; give --global-batch-size", "rampup-batch-size"),
    **_rows("give the flags themselves", "yaml-cfg use-checkpoint-args"),
    **_rows("checkpoints are written before training goes on; leave the flag out", "async-save"),
    **_rows("Muon is not available yet; use --optimizer adam", " ".join(f"muon-{name}" for name in _MUON.split())),
    **_rows("--sliding-window says what a query sees", "pre-tockens next-tockens sparse-mode"),
    **_rows(
        "it belongs to preprocess_data.py; name its output, or a raw file, with --data-path",
        "input output-prefix dataset-impl overwrite-cache n-subs merge-group-keys split-sentences keep-newlines "
        "pad-vocab-size-to reward-tokens max-samples hf-datasets-params dataset-dir cache-dir",
    ),
    **_rows("experts are chosen by the router alone; leave it out", "fix-router"),
    **_rows("samples have the length of --seq-length", "fix-sub-seq-length"),
    **_rows("the order of sending and receiving is megatron-core's; leave it out", "optimize-send-recv-comm"),
    **_rows(_RECORD, "datasets script-data-dir streaming mix-strategy interleave-probs"),
    **_rows(
        "only weights that match the model in every name are loaded; leave the flag out", "load-checkpoint-loosely"
    ),
    **_rows("it writes dumps of an Ascend debugging library, which is not used", "npu-datadump"),
    **_rows("it never had an effect; leave it out", "enable-share-memory output-layer-slice-num unaligned-linear"),
}
"""Flag -> why it is refused."""

NOT_YET_VALUES: dict[tuple[str, str], str] = {
    (
        "--transformer-impl",
        "transformer_engine",
    ): "layers are of the kind local here; weights with Transformer Engine's "
    "names become local ones with convert_ckpt_v2.py --transformer-impl local",
    ("--stage", "pt"): "pretrain_gpt.py pre-trains",
    **{
        ("--stage", stage): _REINFORCED
        for stage in ("rm", "orm", "prm", "simpo", "ray_ppo", "ray_online_dpo", "ray_grpo")
    },
    ("--tokenizer-padding-side", "left"): "rows are filled up behind their samples, which changes no result",
    ("--ckpt-format", "zarr"): "megatron-core no longer writes it; use torch_dist",
    ("--moe-token-dispatcher-type", "flex"): "it needs the library DeepEP; use alltoall",
    ("--moe-token-dispatcher-type", "alltoall_seq"): "megatron-core no longer has it; use alltoall",
    ("--moe-router-load-balancing-type", "softmax_topk"): "choose aux_loss or none, with --norm-topk-prob where the "
    "weights are to sum to one",
    ("--moe-router-load-balancing-type", "group_limited_greedy"): _FAMILY,
    ("--moe-router-load-balancing-type", "pai_megatron_aux_loss"): "choose aux_loss",
    ("--moe-router-load-balancing-type", "sparsemixer_topk"): _FAMILY,
    ("--moe-router-score-function", "sqrtsoftplus"): _FAMILY,
    ("--rope-scaling-type", "longrope"): _FAMILY,
    ("--rope-scaling-type", "plm"): _FAMILY,
    ("--position-embedding-type", "alibi"): _FAMILY,
    ("--position-embedding-type", "mrope"): _FAMILY,
    ("--position-embedding-type", "relative"): _FAMILY,
    ("--position-embedding-type", "deepseek4"): _FAMILY,
    ("--optimizer", "muon"): "Muon is not available yet; use adam",
    ("--optimizer", "dist_muon"): "Muon is not available yet; use adam",
    ("--dataloader-type", "cyclic"): "samples are shuffled by the sample index; leave the flag out",
    ("--dataloader-type", "external"): "samples come from --data-path; leave the flag out",
    ("--tokenizer-type", "NullTokenizer"): "without a tokenizer give --vocab-size or --padded-vocab-size alone",
    ("--ai-framework", "mindspore"): "there is one framework, torch",
}
"""(Flag, value) -> why the value is refused."""
