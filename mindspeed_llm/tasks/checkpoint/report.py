"""What a conversion did, as a file beside its output and as a few lines for whoever waits for it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.observability.versions import versions
from mindspeed_llm.tasks.checkpoint.boxes import Box
from mindspeed_llm.tasks.checkpoint.plan import Plan
from mindspeed_llm.tasks.checkpoint.quantised import Dequantised
from mindspeed_llm.tasks.checkpoint.request import ConversionRequest
from mindspeed_llm.tasks.checkpoint.sources import Source
from mindspeed_llm.tasks.checkpoint.verify import Verified

REPORT = "conversion_report.json"
_FORMAT = 1
_READ_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What running a conversion took."""

    seconds: float
    """From opening the source until everything was on the disk."""
    cpu_seconds: float
    peak_anonymous_bytes: int | None


def make_report(
    request: ConversionRequest,
    *,
    family: str,
    topology: Mapping[str, Any],
    plan: Plan,
    source: Source,
    dequantised: Dequantised | None = None,
    hashes: Mapping[str, Mapping[str, str]],
    sizes: Mapping[str, int],
    verified: Verified | None,
    figures: Figures,
    adapter: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The report as plain data.

    Args:
        topology: how the Megatron side is split; both of them with a Megatron input and output.
        hashes: of the output's files by their path: kind of hash -> hexadecimal digits.
        adapter: what `adapter.summary` says of an adapter.
        sizes: bytes of all of the output's files by their path.
    """
    counts = {file.path: len(file.targets) for file in plan.files}
    return {
        "format": _FORMAT,
        "direction": f"{request.load_model_type} -> {request.save_model_type}",
        "family": family,
        "topology": _plain(topology),
        "source": {
            "folder": str(request.load_dir.resolve()),
            "tensors": len(source.names()),
            "taken": len(plan.taken),
            "taken_how": dict(sorted(Counter(_how(plan, source, request.load_model_type)).items())),
            "dropped": dict(sorted(plan.dropped.items())),
        }
        | ({} if dequantised is None else {"dequantised": _dequantised(dequantised)}),
        **({} if adapter is None else {"adapter": dict(adapter)}),
        "output": {
            "tensors": sum(counts.values()),
            "bytes": plan.nbytes,
            "dtypes": dict(
                sorted(Counter(_name(target.dtype) for file in plan.files for target in file.targets).items())
            ),
            "padded": sorted({target.key for file in plan.files for target in file.targets if target.padding}),
            "files": {
                path: {"bytes": size, **({"tensors": counts[path]} if path in counts else {}), **hashes[path]}
                for path, size in sorted(sizes.items())
            },
        },
        "verification": {"mode": request.verify}
        | (
            {}
            if verified is None
            else {
                "output_tensors": verified.targets,
                "source_tensors_converted_back": verified.sources,
                "bytes_compared": verified.nbytes,
            }
        ),
        "seconds": round(figures.seconds, 3),
        "gb_per_second": round(plan.nbytes / 1e9 / figures.seconds, 3),
        "cpu_seconds": round(figures.cpu_seconds, 3),
        "peak_anonymous_bytes": figures.peak_anonymous_bytes,
        "flags": {field.name: _plain(getattr(request, field.name)) for field in fields(request)},
        "versions": versions(),
    }


def table(report: Mapping[str, Any], folder: Path) -> str:
    """The report in a few lines."""
    source, output, verification = report["source"], report["output"], report["verification"]
    dtypes = ", ".join(f"{count} {name}" for name, count in output["dtypes"].items())
    peak = report["peak_anonymous_bytes"]
    rows = [
        ("converted", f"{report['family']}, {report['direction']}, into {folder}"),
        ("read", f"{source['tensors']} tensors, {source['taken']} taken, {len(source['dropped'])} dropped"),
        ("quantised", _quantised(source.get("dequantised"))),
        ("how", ", ".join(f"{count} {how}" for how, count in source["taken_how"].items())),
        ("adapter", adapter_text(report["adapter"]) if "adapter" in report else ""),
        ("written", f"{output['tensors']} tensors ({dtypes}), {output['bytes'] / 1e9:.3f} GB, {_files(output)}"),
        ("verified", _verified(verification)),
        ("took", f"{report['seconds']:.1f} s, {report['gb_per_second']:.2f} GB/s"),
    ]
    if peak is not None:
        rows[-1] = (rows[-1][0], f"{rows[-1][1]}, {peak / 1e6:.0f} MB of memory beside mapped files")
    by_reason = defaultdict(list)
    for name, reason in source["dropped"].items():
        by_reason[reason].append(name)
    for reason, names in sorted(by_reason.items()):
        rows.append(("dropped", f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {reason}"))
    rows.append(("report", str(folder / REPORT)))
    return "\n".join(f"{name:<10} {text}" for name, text in rows if text)


def adapter_text(adapter: Mapping[str, Any]) -> str:
    """What `adapter.summary` says, in a line."""
    count = sum(adapter["weights"].values())
    what = "merged into" if adapter["merged"] else "converted alone; for"
    return (
        f"{adapter['folder']}, rank {adapter['rank']}, alpha {adapter['alpha']}, on {' '.join(adapter['targets'])}: "
        f"{what} {count} tensors"
    )


def read_report(folder: Path) -> dict[str, Any] | None:
    """The report in a folder; None where there is none.

    Raises:
        UserError: it is no report of a conversion, or names files outside of the folder.
    """
    path = folder / REPORT
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        names = [Path(name) for name, file in report["output"]["files"].items() if int(file["bytes"]) >= 0]
        if any(name.is_absolute() or ".." in name.parts for name in names):
            raise ValueError("names files outside of its folder")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{path}: not a report of a conversion ({error!r}); remove it, or use another folder") from None
    return report


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while content := file.read(_READ_BYTES):
            digest.update(content)
    return digest.hexdigest()


def _how(plan: Plan, source: Source, load_model_type: str) -> Iterator[str]:
    """For each source tensor that is taken, how its parts stand on the Megatron side: in one tensor of its own, split
    over several, fused with others, or both.
    """
    # Boxes, not places: replicas on other ranks are no split.
    boxes: dict[str, set[Box]] = defaultdict(set)
    shares: dict[tuple[str, str], set[str]] = defaultdict(set)
    for file in plan.files:
        for target in file.targets:
            for name, piece in target.pieces:
                if load_model_type == "hf":
                    boxes[name].add(piece.hf_box)
                    shares[file.path, target.key].add(name)
                    continue
                for fragment in source.fragments(name, piece.hf_box):
                    boxes[name].add(fragment.box)
                    shares[fragment.file, fragment.key].add(name)
    fused = {name for names in shares.values() if len(names) > 1 for name in names}
    for name in plan.taken:
        words = [word for word, holds in (("split", len(boxes[name]) > 1), ("fused", name in fused)) if holds]
        yield " and ".join(words) or "whole"


def _dequantised(dequantised: Dequantised) -> dict[str, Any]:
    """The tensors with scales are a part of those that they belong to, so they are counted here only."""
    return {
        "tensors": dequantised.tensors,
        "stored_as": dequantised.stored_as,
        "scale_tensors": {f"*{dequantised.scales}": dequantised.tensors},
    }


def _quantised(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    [(scales, count)] = found["scale_tensors"].items()
    return f"{found['tensors']} of them, {found['stored_as']}, dequantised with {count} {scales}"


def _files(output: Mapping[str, Any]) -> str:
    count = sum("tensors" in file for file in output["files"].values())
    return f"{count} weight file{'s' if count > 1 else ''}"


def _verified(verification: Mapping[str, Any]) -> str:
    if verification["mode"] == "none":
        return "nothing (--verify none)"
    return (
        f"{verification['mode']}: names, shapes and values of {verification['output_tensors']} tensors, "
        f"{verification['source_tensors_converted_back']} source tensors converted back, "
        f"{verification['bytes_compared'] / 1e9:.3f} GB compared bit for bit"
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _plain(value: Any) -> Any:
    """A value as JSON knows it."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return str(value)


def report_text(report: Mapping[str, Any]) -> str:
    """The text of the file."""
    return json.dumps(report, indent=2, ensure_ascii=False) + "\n"
