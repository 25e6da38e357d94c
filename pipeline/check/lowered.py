"""Reading a graph for findings: every node with the number of times it runs, and equal findings as one."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node
from nxpipe.pipeline.check.finding import Finding


def each_node(graph: Graph) -> Iterator[tuple[Node, int]]:
    """Each stored node, and how often it runs."""
    times = [1] * len(graph.nodes)
    for repeat in graph.repeats:
        times[repeat.start : repeat.stop] = [repeat.count] * (repeat.stop - repeat.start)
    return zip(graph.nodes, times, strict=True)


def grouped(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that differ in the number of a layer alone are one, with their count."""
    groups: dict[Finding, int] = {}
    for finding in findings:
        one = replace(finding, module=re.sub(r"(?<=\.)\d+(?=\.|$)", "*", finding.module), count=1)
        groups[one] = groups.get(one, 0) + finding.count
    return [replace(finding, count=count) for finding, count in groups.items()]
