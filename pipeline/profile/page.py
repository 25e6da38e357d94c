"""Profiles as one page."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from nxpipe.pipeline.predict.constants import PREDICTED, THIS_PROGRAM
from nxpipe.pipeline.profile.charts import activity, memory_chart, roofline, time_text
from nxpipe.pipeline.profile.programs import ProfiledProgram
from nxpipe.pipeline.util.page.charts import legend, resource_class, resource_shares
from nxpipe.pipeline.util.page.html import Child, Markup, tag
from nxpipe.pipeline.util.page.page import CONTENTS, Section, heading, joined, note, sheet, table, tiles, two
from nxpipe.pipeline.util.text import human_bytes

if TYPE_CHECKING:
    from nxpipe.emulator.analysis.profile import PathShare, Profile, SizeBin

_OPERATORS: Final = 12
_GAPS: Final = 10
_LEAST_SHARE: Final = 0.005  # of the critical path, for a row of a module
_DEEPEST: Final = 9  # levels of indentation


def profile_page(programs: Sequence[ProfiledProgram]) -> bytes:
    origins = list(dict.fromkeys(program.origin for program in programs if program.origin))
    targets = list(dict.fromkeys(program.target for program in programs))
    lead = heading("Profile", joined(*origins, f"for {', '.join(targets)}"), _about())
    sections = [Section(tag("code", each.name), list(_program(each)), "program") for each in programs]
    return sheet("Profile", "Profile", [lead, _links(programs)], sections)


def _links(programs: Sequence[ProfiledProgram]) -> Markup | None:
    """Links to the programs, if there are more than one and too few for the page's own list."""
    if not 1 < len(programs) < CONTENTS:
        return None
    links = [tag("li", tag("a", program.name, href=f"#s{number}")) for number, program in enumerate(programs, start=1)]
    return tag("nav", tag("ul", links), aria_label="Programs", class_="toc")


def _about() -> str:
    return (
        f"Predicted, not measured: “{THIS_PROGRAM}” on the documented costs of its instructions, “{PREDICTED}” by "
        "constants fitted to published measurements."
    )


def _program(program: ProfiledProgram) -> Iterator[Markup]:
    profile = program.profile
    yield _tiles(program)
    yield tag("h3", "Critical path")
    yield resource_shares(profile.whole.path, profile.latency_ps, "critical path", 14)
    yield _legend(profile.whole.path, profile.latency_ps)
    yield tag("h3", "Changes that would help most")
    yield _changes(program)
    yield tag("h3", "Engines over time")
    yield activity(profile)
    yield _engines(profile)
    yield tag("h3", "By operator")
    yield _by_operator(profile)
    yield tag("h3", "By module")
    yield _by_module(profile)
    yield from _roofline(profile)
    yield tag("h3", f"Gaps of the busiest engine, {profile.busiest}")
    yield _gaps(profile)
    yield tag("h3", "Transfers by size")
    yield _sizes("contiguous run (descriptor)", profile.run_sizes())
    yield _sizes("transfer", profile.transfer_sizes())
    if profile.memory:
        yield tag("h3", "Memory over time")
        yield from (memory_chart(profile, name, usage) for name, usage in profile.memory.by_memory.items())


def _tiles(program: ProfiledProgram) -> Markup:
    profile, used = program.profile, program.profile.utilisation
    bound = profile.whole.bound_by or "nothing"
    share = profile.whole.path[bound] / profile.latency_ps if profile.latency_ps else 0.0
    floor, floors = used.over_floor, used.floors_ns
    limit = max(floors, key=lambda name: floors[name])
    figures: list[tuple[str, str]] = [
        (time_text(profile.latency_ps), THIS_PROGRAM),
        (_aws(program), f"{PREDICTED}{_interval(program)}"),
        (bound, f"bound by, {share:.0%} of the critical path"),
        ("–" if floor is None else f"{floor:.1f} ×", f"its floor of {time_text(floors[limit] * 1000)} ({limit})"),
        (
            f"{profile.busy.get(profile.busiest, 0) / max(profile.latency_ps, 1):.0%}",
            f"busiest engine, {profile.busiest}",
        ),
        (human_bytes(used.traffic), "HBM read and written"),
        (human_bytes(used.spilled), "of it spilled and read back"),
    ]
    return tiles(figures)


def _aws(program: ProfiledProgram) -> str:
    found = program.aws.prediction
    return f"{found.value:.2f} ms" if found else "not covered"


def _interval(program: ProfiledProgram) -> str:
    found = program.aws.prediction
    return f", {found.low:.2f} to {found.high:.2f} ms" if found else ""


def _legend(path: Mapping[str, int], total: int) -> Markup:
    return legend(
        (resource_class(resource), f"{resource} {ps / total:.1%}")
        for resource, ps in sorted(path.items(), key=lambda item: (-item[1], item[0]))
        if ps >= _LEAST_SHARE * total
    )


def _changes(program: ProfiledProgram) -> Markup:
    if not program.changes:
        return tag("p", "No change of one cost gains 1 % or more.")
    now = program.profile.latency_ps
    items = [
        tag(
            "article",
            tag("p", tag("strong", f"−{change.gain:.0%}"), f" {change.name}: "
                f"{time_text(now)} → {time_text(change.latency_ns * 1000)}"),
            tag("p", change.action[:1].upper() + change.action[1:] + ".", class_="way-out"),
            class_="change",
        )
        for change in program.changes
    ]  # fmt: skip
    return tag(
        "div", items, tag("p", "Each is an upper bound for its action alone; gains do not add up.", class_="about")
    )


def _engines(profile: "Profile") -> Markup:
    total = max(profile.latency_ps, 1)
    rows = [
        (_named(name, {name: ps}, total), _timed(ps, total))
        for name, ps in sorted(profile.busy.items(), key=lambda item: (-item[1], item[0]))
    ]
    return _table("Engines", ("engine", "busy"), rows)


def _by_operator(profile: "Profile") -> Markup:
    shown = list(profile.by_operator.items())
    rows = [_share_row(profile, name, share) for name, share in shown[:_OPERATORS]]
    return _table(
        "Operators", ("operator", "critical path", "bound by", "HBM"), rows, _left_out(len(shown) - len(rows))
    )


def _by_module(profile: "Profile") -> Markup:
    least = _LEAST_SHARE * profile.latency_ps
    rows = [
        _share_row(profile, name, share, depth)
        for depth, name, share in _joined(list(profile.tree()))
        if share.on_path >= least
    ]
    left = f"Modules with less than {_LEAST_SHARE:.1%} of the critical path are left out."
    return _table("Modules", ("module", "critical path", "bound by", "HBM"), rows, left)


def _joined(tree: "Sequence[tuple[int, str, PathShare]]") -> "Iterator[tuple[int, str, PathShare]]":
    """The tree with each chain of modules that have one child and no time of their own as a single row."""
    levels = {"": -1}
    children = Counter(name.rpartition(".")[0] for _, name, _ in tree)
    first: str | None = None  # the module above a chain
    for position, (_, name, share) in enumerate(tree):
        above = name.rpartition(".")[0] if first is None else first
        if children[name] == 1 and tree[position + 1][2].on_path == share.on_path:
            first = above
            continue
        levels[name] = levels[above] + 1
        yield levels[name], name[len(above) + 1 :] if above else name, share
        first = None


def _share_row(profile: "Profile", name: str, share: "PathShare", depth: int = 0) -> tuple[Child, ...]:
    total = max(profile.latency_ps, 1)
    return (
        _named(name, share.path, total, depth),
        _timed(share.on_path, total),
        share.bound_by or "–",
        human_bytes(share.nbytes),
    )


def _named(name: str, shares: Mapping[str, int], total: int, depth: int = 0) -> Markup:
    """A name above a bar of its shares."""
    return tag(
        "div", tag("code", name), resource_shares(shares, total, name, 6), class_=f"named i{min(depth, _DEEPEST)}"
    )


def _roofline(profile: "Profile") -> Iterator[Markup]:
    whole = profile.whole
    named = [("program", whole), *profile.by_operator.items()]
    points = [
        (name, 2 * share.multiply_adds / share.nbytes, 2000 * share.multiply_adds / share.on_path, share)
        for name, share in named
        if share.multiply_adds and share.nbytes and share.on_path
    ][:8]
    if not points:
        return
    yield tag("h3", "Roofline")
    yield roofline(profile, [point[:3] for point in points])
    rates, rows = profile.rates, []
    for number, (name, intensity, rate, _) in enumerate(points):
        roof = min(rates["flops"], rates["hbm"] * intensity)
        label = tag("span", str(number) if number else "P", class_="mark-label")
        rows.append(([label, " ", tag("code", name)], f"{intensity:,.1f}", f"{rate / 1e3:.2f}", f"{rate / roof:.1%}"))
    yield _table("Points of the roofline", ("point", "FLOP/byte", "TFLOP/s", "of the roof"), rows)


def _gaps(profile: "Profile") -> Markup:
    total = max(profile.latency_ps, 1)
    idle = sum(profile.gaps.values())
    rows = []
    for reason, ps in list(profile.gaps.items())[:_GAPS]:
        place = f"{reason.place.operator} of {reason.place.module}"
        why = tag("div", tag("span", f"{reason.resource}: {reason.work}"), tag("small", tag("code", place)))
        rows.append((why, _timed(ps, total)))
    left = _left_out(len(profile.gaps) - len(rows))
    about = f"{profile.busiest} idles for {time_text(idle)}, {idle / total:.1%} of the time. {left}"
    return _table("Gaps", ("it waits for", "idle"), rows, about)


def _timed(ps: int, total: int) -> Markup:
    """A time, and its share of the program's."""
    return two(time_text(ps), f"{ps / total:.1%}")


def _sizes(what: str, bins: "Sequence[SizeBin]") -> Markup:
    most = max((each.nbytes for each in bins), default=1)
    rows = [
        (
            tag(
                "div", f"{_binary(each.least)} to {_binary(2 * each.least)}", _bar(each.nbytes, most), class_="named i0"
            ),
            human_bytes(each.nbytes),
            f"{each.transfers:,}",
        )
        for each in bins
    ]
    return _table(f"Transfers by size of each {what}", (what, "bytes", "transfers"), rows)


def _bar(part: int, most: int) -> Markup:
    width = f"{100 * part / max(most, 1):.2f}%"
    return tag("svg", tag("rect", width=width, height=6, class_="r-dma"), class_="shares", height=6, aria_hidden="true")


def _binary(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def _left_out(count: int) -> str:
    return f"{count:,} more with less time are left out." if count > 0 else ""


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[Child]], remark: str = "") -> Markup:
    return tag("div", table(columns, rows, caption), note(remark))
