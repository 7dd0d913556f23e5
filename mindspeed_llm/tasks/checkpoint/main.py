"""The command `convert_ckpt_v2.py`."""

from __future__ import annotations

import gc

from mindspeed_llm.tasks.checkpoint.command_line import parse


def main(argv: list[str]) -> None:
    """Convert as `argv` says and print what was done."""
    request = parse(argv)

    # What is imported stays: looking for garbage among its million objects, now and later, only costs time.
    gc.disable()
    import torch

    from mindspeed_llm.tasks.checkpoint.convert import convert
    from mindspeed_llm.tasks.checkpoint.dry_run import lines
    from mindspeed_llm.tasks.checkpoint.prepare import prepare
    from mindspeed_llm.tasks.checkpoint.progress import Progress
    from mindspeed_llm.tasks.checkpoint.report import table

    gc.freeze()
    gc.enable()
    if request.dry_run:
        conversion = prepare(request)
        tensors = conversion.model.hf_tensors()
        for line in lines(conversion.plan, conversion.loaded.source, tensors, conversion.adapter_summary):
            print(line)
        return
    torch.set_num_threads(1)  # the threads are ours: one per slab
    print(table(convert(request, progress=Progress()).report, request.save_dir))
