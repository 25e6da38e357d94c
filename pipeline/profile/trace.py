"""Profiles as a trace in Chrome's JSON format, which Perfetto opens.

A process is a program on one core, its threads are the engines and DMA queues. Of each loop, three iterations are
drawn: the first, one in the steady state, the last; the others are one slice for each engine.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.predict.constants import THIS_PROGRAM
from nxpipe.pipeline.profile.programs import ProfiledProgram

if TYPE_CHECKING:
    from nxpipe.emulator.analysis.execution_trace import Event
    from nxpipe.emulator.analysis.profile import Profile
    from nxpipe.emulator.isa.instruction import Engine
    from nxpipe.emulator.isa.program import Step

_PS_OF_NS: Final = 1000
_NS_OF_US: Final = 1000
_DRAWN: Final = 4  # iterations of a loop up to which all are drawn
_SAMPLES: Final = 500  # points of a counter
PATH: Final = "critical path"

Row = dict[str, Any]


def trace_document(programs: Sequence[ProfiledProgram]) -> dict[str, Any]:
    rows = [row for pid, program in enumerate(programs, start=1) for row in _rows(program, pid)]
    about = {program.title: f"{THIS_PROGRAM}, {program.profile.latency_ps / 1e9:.6f} ms" for program in programs}
    return {"displayTimeUnit": "ns", "otherData": about, "traceEvents": rows}


def to_bytes(document: dict[str, Any]) -> bytes:
    """One event in a line. JSON escapes all characters that are not ASCII."""
    head = json.dumps({name: value for name, value in document.items() if name != "traceEvents"})[:-1]
    events = ",\n".join(json.dumps(row, separators=(",", ":")) for row in document["traceEvents"])
    return f'{head}, "traceEvents": [\n{events}\n]}}\n'.encode()


def _rows(program: ProfiledProgram, pid: int) -> Iterator[Row]:
    profile = program.profile
    threads = [PATH, *(engine.value for engine in profile.trace.by_engine)]
    numbers = {name: tid for tid, name in enumerate(threads, start=1)}
    yield _metadata(pid, 0, "process_name", name=f"{program.title}, {profile.program.core} core ({THIS_PROGRAM})")
    for name, tid in numbers.items():
        yield _metadata(pid, tid, "thread_name", name=name)
        yield _metadata(pid, tid, "thread_sort_index", sort_index=tid)
    drawn = list(_Drawing(profile).slices())
    for each in drawn:
        yield each.row(pid, numbers[each.thread])
    yield from (each.row(pid, numbers[PATH]) for each in _path(profile))
    yield from _arrows(profile, drawn, pid, numbers)
    yield from _counters(profile, pid)


def _metadata(pid: int, tid: int, what: str, **arguments: object) -> Row:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": what, "args": arguments}


@dataclass(frozen=True, slots=True)
class _Slice:
    """A slice of a thread, in ps of the program; `event` is the event that it draws, if it draws a single one."""

    thread: str
    name: str
    category: str
    begin: int
    end: int
    about: Row
    event: int | None = None

    def row(self, pid: int, tid: int) -> Row:
        # Begin and end are rounded, not the duration, so that slices that do not overlap still do not.
        begin, end = self.begin // _PS_OF_NS, self.end // _PS_OF_NS
        exact = {"begin_ps": self.begin, "duration_ps": self.end - self.begin}
        return {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "name": self.name,
            "cat": self.category,
            "ts": begin / _NS_OF_US,
            "dur": (end - begin) / _NS_OF_US,
            "args": {**self.about, **exact},
        }


@dataclass(frozen=True, slots=True)
class _Execution:
    """An execution of an event, or the `count` executions of an engine in a repetition, for which `event` is None.
    `rest` is the loop, with the indices around it, of which it is in an iteration that is not drawn; `iterations` the
    first and the last of these."""

    thread: str
    event: int | None
    begin: int
    end: int
    count: int
    rest: tuple[int, ...] | None
    iterations: tuple[int, int]
    of: int


class _Drawing:
    """The slices of the engines of one program."""

    def __init__(self, profile: "Profile") -> None:
        from nxpipe.emulator.isa.program import Loop, counted

        self._profile = profile
        self._trace = profile.trace
        self._loops = list(_loops(profile.program.body))
        loops = {place: step for place, step in enumerate(profile.program.body) if isinstance(step, Loop)}
        self._counts = {place: loop.count for place, loop in loops.items()}
        self._by_iteration = {place: counted(loop.body) for place, loop in loops.items()}
        self._drawn = {
            place: {0, self._steady(repetition.at, place)}
            for repetition in reversed(self._trace.repetitions)
            for place in (repetition.place,)
        }

    def slices(self) -> Iterator[_Slice]:
        for engine, numbers in self._trace.by_engine.items():
            executions = sorted(self._executions(engine, numbers), key=lambda each: (each.begin, each.end))
            for rest, group in groupby(executions, key=lambda each: each.rest):
                members = list(group)
                if rest is None:
                    yield from map(self._single, members)
                else:
                    yield _merged(engine.value, members)

    def _executions(self, engine: "Engine", numbers: Sequence[int]) -> Iterator[_Execution]:
        """The executions of an engine's events. An event that runs while a repetition begins is executed before and
        after it; those between are one."""
        trace = self._trace
        for number in numbers:
            event = trace.events[number]
            yield self._execution(number, trace.real(event.begin), event.end - event.begin, event.indices)
        for which, repetition in enumerate(trace.repetitions):
            loop_numbers = [number for number in numbers if self._is_in(trace.events[number], repetition.place)]
            count = repetition.iterations * self._by_iteration[repetition.place].get(engine, 0)
            if not count:
                continue
            running = [n for n in loop_numbers if trace.events[n].begin <= repetition.at < trace.events[n].end]
            begin, end = trace.real(repetition.at), repetition.real + repetition.elapsed
            begun = [trace.events[n].indices[0] for n in loop_numbers if trace.events[n].begin <= repetition.at]
            earlier = trace.repetitions[:which]
            for number in running:
                event = trace.events[number]
                duration = event.end - event.begin
                before = event.begin + sum(each.elapsed for each in earlier)
                begin, end = before + duration, before + repetition.elapsed
                skipped = sum(
                    each.iterations
                    for each in (*earlier, repetition)
                    if each.place == repetition.place and each.at >= event.begin
                )
                yield self._execution(number, end, duration, (event.indices[0] + skipped, *event.indices[1:]))
            if count > len(running):
                low = begun[-1] if begun else 0
                iterations, rest = (low, low + repetition.iterations), (repetition.place, -1)
                of = self._counts[repetition.place]
                yield _Execution(engine.value, None, begin, end, count - len(running), rest, iterations, of)

    def _is_in(self, event: "Event", place: int) -> bool:
        """True if an event belongs to the outermost loop at a place of the program's body."""
        loops = self._loops[event.number]
        return bool(loops) and loops[0][2] == place

    def _execution(self, number: int, begin: int, duration: int, indices: tuple[int, ...]) -> _Execution:
        event = self._trace.events[number]
        thread = event.engine.value
        for depth, (count, identity, place) in enumerate(self._loops[event.number]):
            if count <= _DRAWN:
                continue
            steady = self._drawn.get(place, {0, count // 2}) if depth == 0 else {0, count // 2}
            if indices[depth] not in steady | {count - 1}:
                rest = (place, -1) if depth == 0 else (identity, *indices[:depth])
                iterations = (indices[depth], indices[depth])
                return _Execution(thread, number, begin, begin + duration, 1, rest, iterations, count)
        return _Execution(thread, number, begin, begin + duration, 1, None, (0, 0), 0)

    def _steady(self, at: int, place: int) -> int:
        """The last iteration that all engines have completed when the repetitions of a loop begin."""
        current = dict[Any, int]()
        for event in self._trace.events:
            if event.begin > at:
                break
            if self._is_in(event, place):
                current[event.engine] = event.indices[0]
        return max(min(current.values()) - 1, 0)

    def _single(self, execution: _Execution) -> _Slice:
        assert execution.event is not None
        event = self._trace.events[execution.event]
        instruction, place = self._trace.instruction(event), self._profile.places[event.number]
        about: Row = {"module": place.module, "operator": place.operator, "instruction": event.number}
        if event.indices:
            about["iteration"] = list(event.indices)
        return _Slice(
            execution.thread,
            instruction.name,
            place.operator,
            execution.begin,
            execution.end,
            about,
            execution.event,
        )


def _merged(thread: str, members: Sequence[_Execution]) -> _Slice:
    first = min(member.iterations[0] for member in members)
    last = max(member.iterations[1] for member in members)
    count = sum(member.count for member in members)
    name = f"iterations {first + 1} to {last + 1} of {members[0].of}"
    return _Slice(thread, name, "repeated", members[0].begin, members[-1].end, {"instructions": count})


def _loops(
    body: "Sequence[Step]", outer: tuple[tuple[int, int, int], ...] = ()
) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """The loops around each instruction of the text: count, a number of its own, and place in the body around it."""
    from nxpipe.emulator.isa.program import Loop

    for place, step in enumerate(body):
        if isinstance(step, Loop):
            yield from _loops(step.body, (*outer, (step.count, id(step), place)))
        else:
            yield outer


def _path(profile: "Profile") -> Iterator[_Slice]:
    """The modules on the critical path; one execution of what repeats, and one slice for all others."""
    trace = profile.trace
    if not trace.events:
        return
    last = max(range(len(trace.events)), key=lambda number: trace.events[number].end)
    steps = [(last, trace.events[last].begin, trace.end), *trace.back(last, 0)]
    parts = [
        (profile.places[trace.events[number].number], resource, begin, end)
        for number, low, high in reversed(steps)
        for resource, begin, end in trace.events[number].parts(low, high)
    ]
    cuts = {repetition.at: repetition for repetition in trace.repetitions}
    for (place, resource), group in groupby(parts, key=lambda part: (part[0], part[1])):
        members = list(group)
        begin, end = members[0][2], members[-1][3]
        about = {"module": place.module, "operator": place.operator, "resource": resource}
        for at in sorted(at for at in cuts if begin <= at < end):
            if begin < at:
                yield _Slice(PATH, place.module, resource, trace.real(begin, after=True), trace.real(at), about)
            begin = at
        yield _Slice(PATH, place.module, resource, trace.real(begin, after=True), trace.real(end), about)
    for at in cuts:
        begin, end = trace.real(at), trace.real(at, after=True)
        iterations = sum(each.iterations for each in trace.repetitions if each.at == at)
        yield _Slice(PATH, f"{iterations} further iterations", "repeated", begin, end, {"iterations": iterations})


def _arrows(profile: "Profile", drawn: Iterable[_Slice], pid: int, numbers: dict[str, int]) -> Iterator[Row]:
    """An arrow to each slice that another engine let begin."""
    trace = profile.trace
    by_event = dict[int, _Slice]()
    for each in drawn:
        if each.event is not None:
            by_event.setdefault(each.event, each)
    count = 0
    for number, each in by_event.items():
        cause = trace.cause(number)
        source = by_event.get(cause) if cause is not None else None
        if source is None or source.thread == each.thread or source.end != each.begin:
            continue
        count += 1
        # An arrow leaves inside its slice: at the end, another one may begin.
        begin = max(source.begin // _PS_OF_NS, source.end // _PS_OF_NS - 1) / _NS_OF_US
        end = each.begin // _PS_OF_NS / _NS_OF_US
        common: Row = {"pid": pid, "name": "semaphore", "cat": "wait", "id": f"{pid}.{count}"}
        yield {"ph": "s", "tid": numbers[source.thread], "ts": begin, **common}
        yield {"ph": "f", "bp": "e", "tid": numbers[each.thread], "ts": end, **common}


def _counters(profile: "Profile", pid: int) -> Iterator[Row]:
    """The bytes in use; in a repetition, the most of its period."""
    for name, usage in (profile.memory.by_memory if profile.memory else {}).items():
        for ps, nbytes in usage.points(profile.trace, _SAMPLES):
            at = ps // _PS_OF_NS / _NS_OF_US
            common: Row = {"ph": "C", "pid": pid, "tid": 0, "name": f"{name.upper()} in use"}
            yield {**common, "ts": at, "args": {"bytes": nbytes}}
