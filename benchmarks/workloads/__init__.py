"""The programs of the SGLang paper as programs of the DSL, on synthetic data with the paper's shapes."""

from __future__ import annotations

from workloads import answers, chats, traces, trees
from workloads.base import Count, Workload, Writer

ALL = (*answers.WORKLOADS, *traces.WORKLOADS, *trees.WORKLOADS, *chats.WORKLOADS)
WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in ALL}

__all__ = ["WORKLOADS", "Count", "Workload", "Writer"]
