"""Flags of features; each goes when its feature registers it, see `parser`."""

from mindspeed_llm.training.arguments.flag import Group, count, integer, numbers, positive, several, switch, value

_FEATURES = "features_manager"
_PROFILING = "features_manager.features.profiling"

KERNELS = Group(
    title="Kernels and overlap",
    flags=(
        switch("--use-flash-attn", "the device's flash attention.", f"{_FEATURES}.transformer.flash_attention"),
        switch("--use-fused-rmsnorm", "the device's fused RMSNorm.", f"{_FEATURES}.transformer.fused_operators"),
        switch("--use-fused-swiglu", "the device's fused SwiGLU.", f"{_FEATURES}.transformer.fused_operators"),
        switch(
            "--use-fused-rotary-pos-emb",
            "the device's fused rotary positions.",
            f"{_FEATURES}.transformer.fused_operators",
        ),
        switch(
            "--use-ascend-coc",
            "compute linear layers of TP in chunks, each sent while the next is computed (any device).",
            f"{_FEATURES}.tensor_parallel.coc",
        ),
        value("--coc-parallel-num", positive, None, "number of those chunks.", f"{_FEATURES}.tensor_parallel.coc"),
        switch(
            "--reuse-fp32-param",
            "bf16 parameters are the upper halves of their fp32 masters, in the same memory.",
            f"{_FEATURES}.optimizer.reuse_fp32_param",
        ),
        switch("--deterministic-mode", "the same bits in each run.", f"{_FEATURES}.functional.deterministic"),
    ),
)

STAGES = Group(
    title="Uneven stages",
    flags=(
        value(
            "--num-layer-list",
            numbers,
            None,
            "number of layers of each stage, where they are uneven.",
            "features_manager.pipeline_parallel.num_layer_list",
        ),
        value(
            "--noop-layers",
            numbers,
            None,
            "positions (from 0) of layers that do nothing, to make stages even; they count in --num-layers.",
            "features_manager.pipeline_parallel.noop_layers",
        ),
    ),
)

DOCUMENTS = Group(
    title="Documents",
    flags=(
        switch(
            "--reset-attention-mask",
            "no attention across the ends of documents in a sample.",
            "features_manager.transformer.reset_attention_mask training.data",
        ),
    ),
)

RECOMPUTED = Group(
    title="Recomputation of parts",
    flags=(
        switch(
            "--recompute-activation-function",
            "compute the activation of MLPs again.",
            f"{_FEATURES}.recompute.activation_function",
        ),
        value(
            "--recompute-activation-function-num-layers",
            positive,
            None,
            "of so many layers of each stage; by default all.",
            f"{_FEATURES}.recompute.activation_function",
        ),
        switch("--recompute-norm", "compute norms again.", f"{_FEATURES}.recompute.norm"),
        value(
            "--recompute-norm-num-layers",
            positive,
            None,
            "of so many layers of each stage; by default all.",
            f"{_FEATURES}.recompute.norm",
        ),
        switch(
            "--enable-recompute-layers-per-pp-rank",
            "--recompute-num-layers counts layers of a stage, all its virtual parts together.",
            f"{_FEATURES}.recompute.layers_per_stage",
        ),
    ),
)

PROFILE = Group(
    title="Profile",
    flags=(
        switch("--profile", "record a profile with the device's profiler.", _PROFILING),
        value("--profile-step-start", count, 10, "first step of the profile.", _PROFILING),
        value("--profile-step-end", integer, 12, "step before which it ends; -1: at the end of the run.", _PROFILING),
        several("--profile-ranks", integer, (0,), "ranks that record; -1: all.", _PROFILING),
        value(
            "--profile-level",
            str,
            "level0",
            "amount of detail, from none to all (Ascend).",
            _PROFILING,
            choices=("level_none", "level0", "level1", "level2"),
        ),
        value(
            "--profile-export-type", str, "text", "format of the files (Ascend).", _PROFILING, choices=("text", "db")
        ),
        switch("--profile-data-simplification", "delete raw data once it is evaluated (Ascend).", _PROFILING),
        switch("--profile-with-cpu", "record the host's activity too.", _PROFILING),
        switch("--profile-with-stack", "record Python call stacks.", _PROFILING),
        switch("--profile-with-memory", "record memory use.", _PROFILING),
        switch("--profile-record-shapes", "record shapes of inputs.", _PROFILING),
        value("--profile-save-path", str, "./profile_dir", "folder for profiles.", _PROFILING, metavar="DIR"),
    ),
)
