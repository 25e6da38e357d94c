"""The wire format: what is written is read again, and no input is more than a sentence."""

import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.emulator.errors import HloInvalid
from nxpipe.emulator.hlo import wire
from nxpipe.emulator.hlo.canonical import canonical
from nxpipe.emulator.hlo.constraints import violations
from nxpipe.emulator.hlo.schema import HloModule
from nxpipe.emulator.hlo.wire import Fixed, Message
from tests.hlo.modules import SAMPLES, good, written

NUMBERS = st.integers(1, (1 << 29) - 1)
VALUES = st.one_of(
    st.integers(0, (1 << 64) - 1),
    st.binary(max_size=40),
    st.binary(min_size=4, max_size=4).map(Fixed),
    st.binary(min_size=8, max_size=8).map(Fixed),
)


@given(st.lists(st.tuples(NUMBERS, VALUES), max_size=12))
def test_a_message_is_read_as_it_was_written(fields: list[tuple[int, wire.Value]]) -> None:
    data = Message(list(fields)).encode()
    assert Message.parse(data).fields == sorted(fields, key=lambda field: field[0])
    assert Message.parse(data).encode() == data


@given(NUMBERS, st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=20))
def test_integers_are_read_with_their_sign_packed_or_not(number: int, values: list[int]) -> None:
    packed, single = Message(), Message()
    packed.set_numbers(number, values)
    for value in values:
        single.add(number, value)
    assert Message.parse(packed.encode()).numbers(number) == values
    assert Message.parse(single.encode()).numbers(number) == values
    single.set(number, values[0])
    assert single.number(number) == values[0]


def test_an_integer_of_any_length_is_written_as_the_shortest() -> None:
    assert Message.parse(b"\x08\x81\x80\x00").encode() == b"\x08\x01"


def test_fields_are_written_in_the_order_of_their_numbers_and_repeated_ones_in_theirs() -> None:
    assert Message.parse(b"\x12\x01b\x08\x01\x12\x01a").encode() == b"\x08\x01\x12\x01b\x12\x01a"


def test_a_change_in_an_opened_message_is_written_with_its_parent() -> None:
    outer = Message.parse(b"\x0a\x02\x08\x01\x12\x03abc")
    inner = outer.message(1)
    assert inner is not None
    inner.set(1, 300)
    assert outer.encode() == b"\x0a\x03\x08\xac\x02\x12\x03abc"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x08", "truncated"),
        (b"\x0a\x05ab", "it ends after its message"),
        (b"\x0d\x00", "it ends after its message"),
        (b"\x08" + b"\x80" * 10 + b"\x01", "more than ten bytes"),
        (b"\x08" + b"\xff" * 9 + b"\x7f", "more than 64 bits"),
        (b"\x00\x01", "no field has that number"),
        (b"\x0b\x0c", "wire type 3 is none of those in use"),
        (b"\x0e", "wire type 6"),
    ],
)
def test_a_malformed_message_is_refused_with_its_place(data: bytes, reason: str) -> None:
    with pytest.raises(HloInvalid, match=reason):
        Message.parse(data)
    nested = Message()
    nested.add(7, data)
    with pytest.raises(HloInvalid, match=rf"in field 7.*{reason}"):
        Message.parse(nested.encode()).message(7)


@pytest.mark.parametrize("read", [Message.number, Message.data, Message.text, Message.message])
def test_a_singular_field_that_occurs_twice_is_refused(read: object) -> None:
    assert callable(read)
    value = b"\x08\x01\x08\x01" if read is Message.number else b"\x0a\x00\x0a\x00"
    with pytest.raises(HloInvalid, match="occurs twice"):
        read(Message.parse(value), 1)


@pytest.mark.parametrize("read", [Message.number, Message.numbers, Message.data, Message.text, Message.message])
def test_a_field_of_another_kind_is_refused(read: object) -> None:
    assert callable(read)
    with pytest.raises(HloInvalid, match="in field 1: it"):
        read(Message([(1, Fixed(b"1234") if read is not Message.number else b"1")]), 1)


def test_messages_are_nested_to_a_limit() -> None:
    data = b""
    for _ in range(200):
        outer = Message()
        outer.add(1, data)
        data = outer.encode()
    with pytest.raises(HloInvalid, match="nested more than 32 deep"):
        _innermost(Message.parse(data))


def _innermost(message: Message) -> Message:
    inner = message.message(1)
    return message if inner is None else _innermost(inner)


def test_size_and_number_of_fields_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FIELDS", 10)
    assert len(Message.parse(b"\x08\x01" * 10).fields) == 10
    with pytest.raises(HloInvalid, match="more than 10 fields"):
        Message.parse(b"\x08\x01" * 11)
    opened = Message.parse(b"\x0a\x0c" + b"\x08\x01" * 6 + b"\x0a\x0c" + b"\x08\x01" * 6)
    with pytest.raises(HloInvalid, match="more than 10 fields"):
        opened.messages(1)
    monkeypatch.setattr(wire, "MAX_BYTES", 3)
    with pytest.raises(HloInvalid, match="4 bytes, and protobuf permits 3"):
        Message.parse(b"\x08\x01\x08\x01")
    with pytest.raises(HloInvalid, match="would have 4 bytes"):
        Message([(1, 1), (2, 1)]).encode()


def test_a_large_literal_is_copied_once() -> None:
    size = 32 << 20
    literal = Message([(8, bytes(size))])
    instruction = Message([(1, b"weights"), (8, literal)])
    data = Message([(3, Message([(2, instruction)]))]).encode()
    tracemalloc.start()
    opened = Message.parse(data)
    opened.messages(3)[0].messages(2)[0].message(8)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    assert opened.encode() == data
    assert tracemalloc.get_traced_memory()[1] < size + 100_000
    tracemalloc.stop()


def survives(data: bytes) -> bool:
    """Whether the bytes are read; each reader may refuse them in a sentence."""
    sentences = list(refusals(data))
    assert not any("\n" in sentence for sentence in sentences)
    return not sentences


def refusals(data: bytes) -> Iterator[str]:
    for read in (HloModule.read, canonical, lambda module: violations(module, "trn2")):
        try:
            read(data)
        except HloInvalid as refused:
            yield str(refused)


@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_a_changed_module_is_read_or_refused_in_a_sentence(name: str, data: st.DataObject) -> None:
    damaged = bytearray(data.draw(st.sampled_from([written(name), good(name)])))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        match data.draw(st.sampled_from(["change", "cut", "repeat"])):
            case "change":
                damaged[at] = data.draw(st.integers(0, 255))
            case "cut":
                del damaged[at : at + data.draw(st.integers(1, 20))]
                damaged = damaged or bytearray(b"\0")
            case _:
                damaged[at:at] = damaged[at : at + data.draw(st.integers(1, 60))]
    survives(bytes(damaged))


def test_a_module_that_is_cut_anywhere_is_read_or_refused() -> None:
    whole = good("two caches")
    assert survives(whole)
    assert not any(survives(whole[:end]) for end in range(len(whole) // 2))
    for end in range(len(whole) // 2, len(whole)):
        survives(whole[:end])


@given(st.binary(max_size=300))
def test_bytes_that_are_no_module_are_refused(data: bytes) -> None:
    survives(data)
