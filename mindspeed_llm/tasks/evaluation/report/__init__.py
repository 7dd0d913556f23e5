"""The results of an evaluation as a page to look at."""

from mindspeed_llm.tasks.evaluation.report.page import write_report

__all__ = ["write_report"]
