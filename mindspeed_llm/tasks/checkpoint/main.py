"""The command `convert_ckpt_v2.py`."""

from __future__ import annotations

import time

from mindspeed_llm.tasks.checkpoint.command_line import parse


def main(argv: list[str]) -> None:
    """Convert as `argv` says and print what was done."""
    request = parse(argv)
    started = time.perf_counter()

    import torch

    from mindspeed_llm.tasks.checkpoint.convert import convert

    torch.set_num_threads(1)  # the threads are ours: one per slab
    plan = convert(request).plan
    seconds = time.perf_counter() - started
    count = sum(len(file.targets) for file in plan.files)
    print(
        f"wrote {count} tensors, {plan.nbytes / 1e9:.3f} GB, to {len(plan.files)} files in {request.save_dir} in "
        f"{seconds:.1f} s ({plan.nbytes / 1e9 / seconds:.2f} GB/s)"
    )
    for reason in sorted(set(plan.dropped.values())):
        names = [name for name, why in plan.dropped.items() if why == reason]
        print(f"not converted, {reason}: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}")
