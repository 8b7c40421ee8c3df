"""Rows and Markdown of ``benchmarks/federation.py``."""

import statistics
from collections.abc import Mapping
from typing import Any

import torch

STEPPED = (
    "| contender | s a round | times plain (quartiles) | CPU s, times plain | peak MB "
    "| difference |\n|---|---:|---:|---:|---:|---:|"
)
WHOLE = (
    "| run | s in all | times fedfrozen (quartiles) | s a later round | times fedfrozen "
    "| peak MB | accuracy | difference |\n|---|---:|---:|---:|---:|---:|---:|---:|"
)


def difference(own: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]) -> float:
    """Return the largest absolute difference between two sets of weights, inf if names differ."""
    if own.keys() != plain.keys():
        return float("inf")
    return max(float((own[name] - value).abs().max()) for name, value in plain.items())


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the quartiles of one or more values."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, method="inclusive")
    return low, middle, high


def summary(
    name: str, rounds: list[dict[str, float]], base: list[dict[str, float]]
) -> dict[str, Any]:
    """Return one row: medians, and quartiles of the ratio to the plain loop, round by round."""
    row: dict[str, Any] = {"contender": name, "repetitions": len(rounds)}
    row["peak_mb"] = max(report["peak_mb"] for report in rounds)
    for key in ("seconds", "cpu_seconds"):
        row[key] = statistics.median(report[key] for report in rounds)
        pairs = zip(rounds, base, strict=True)
        low, middle, high = quartiles([own[key] / plain[key] for own, plain in pairs])
        row[f"{key}_times_plain"] = middle
        row[f"{key}_times_plain_quartiles"] = [low, high]
    row["rounds"] = rounds
    return row


def markdown(document: Mapping[str, Any]) -> str:
    """Return all tables."""
    lines = [f"{document['threads']} torch threads each, torch {torch.__version__}"]
    for table in document["tables"]:
        lines += ["", f"### {table['workload']}: {table['title']}", ""]
        if "skipped" in table:
            lines.append(f"skipped: {table['skipped']}")
        elif table.get("kind") == "whole":
            lines += [WHOLE, *map(_whole_line, table["rows"])]
        else:
            lines += [STEPPED, *map(_line, table["rows"])]
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return f"| {row['contender']} | - | - | - | - | {row['failed']} |"
    low, high = row["seconds_times_plain_quartiles"]
    return (
        f"| {row['contender']} | {row['seconds']:.3f} | {row['seconds_times_plain']:.3f} "
        f"({low:.3f}-{high:.3f}) | {row['cpu_seconds_times_plain']:.3f} | {row['peak_mb']:,.0f} "
        f"| {row['difference']:.1e} |"
    )


def _whole_line(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return f"| {row['contender']} | - | - | - | - | - | - | {row['failed']} |"
    low, high = row["seconds_quartiles"]
    accuracy = "-" if row["accuracy"] is None else f"{row['accuracy']:.4f}"
    return (
        f"| {row['contender']} | {row['seconds']:.1f} | {row['seconds_times_fedfrozen']:.2f} "
        f"({low:.2f}-{high:.2f}) | {row['seconds_later_round']:.2f} "
        f"| {row['later_times_fedfrozen']:.2f} | {row['peak_mb']:,.0f} | {accuracy} "
        f"| {row['difference']:.1e} |"
    )
