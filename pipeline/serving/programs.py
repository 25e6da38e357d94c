"""Programs of a served decoder: which are loaded, and how a chunk of a prompt and a step of all rows are run.

The programs share a KV cache of `rows` rows and `capacity` tokens. An artifact with `extend` programs reads a prompt
into one row while others are being decoded, so requests come and go one by one. One with `prefill` alone fills all rows
at once, so its requests run in batches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from nxpipe.pipeline.util.errors import BuildRefused

if TYPE_CHECKING:
    from nxpipe.emulator.numerics import Array


class Session(Protocol):
    """Loaded programs with their weights; states stay where the programs run."""

    def run(self, program: str, inputs: "Mapping[str, Array]") -> "dict[str, Array]":
        """The outputs of a program other than its states."""

    def close(self) -> None: ...


class ProgramShape(Protocol):
    """What is known of a program before it is loaded."""

    @property
    def name(self) -> str: ...

    @property
    def phase(self) -> str: ...

    @property
    def batch(self) -> int: ...

    @property
    def sequence(self) -> int: ...


@dataclass(frozen=True)
class Prompt:
    """The part of a prompt that one run reads into a row, from a position on."""

    row: int
    position: int
    tokens: Sequence[int]


@dataclass(frozen=True)
class DecoderPrograms:
    """The programs of one batch size, by name: prompts by the tokens that they read, and the decode step."""

    rows: int
    capacity: int
    prompts: Mapping[int, str]  # program by its sequence length, ascending
    decode: str
    is_continuous: bool

    @classmethod
    def of(
        cls, model: str, executables: Sequence[ProgramShape], rows: int | None = None, *, smallest: bool = False
    ) -> "DecoderPrograms":
        """The programs of a batch size, by default the largest or the smallest; BuildRefused without any."""
        found = cls.by_rows(executables)
        if not found:
            raise BuildRefused(
                f"{model}: it has no programs that generate text, which are decode with prefill or extend; build it "
                "with --phases prefill,decode"
            )
        if rows is not None and rows not in found:
            raise BuildRefused(f"{model}: no programs for {rows} rows; there are {', '.join(map(str, found))}")
        return found[rows or (min(found) if smallest else max(found))]

    @classmethod
    def by_rows(cls, executables: Sequence[ProgramShape]) -> "dict[int, DecoderPrograms]":
        """The programs of each batch size that can generate text, the smallest first."""
        decodes = {each.batch: each for each in executables if each.phase == "decode"}
        found: dict[int, DecoderPrograms] = {}
        for batch, decode in sorted(decodes.items()):
            for phase in ("prefill", "extend"):
                own = [each for each in executables if (each.phase, each.batch) == (phase, batch)]
                prompts = {each.sequence: each.name for each in sorted(own, key=lambda each: each.sequence)}
                if prompts:
                    found[batch] = cls(batch, decode.sequence, prompts, decode.name, phase == "extend")
        return found

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.prompts.values(), self.decode)

    @property
    def longest_prompt(self) -> int:
        """The tokens of the longest prompt; one place of the cache is left for the answer."""
        return self.capacity - 1 if self.is_continuous else min(max(self.prompts), self.capacity)

    @property
    def chunk(self) -> int:
        """The tokens of the longest chunk. Longer prompts are cut at its multiples alone."""
        return max(self.prompts)

    def length_for(self, tokens: int) -> int:
        """The length of the shortest prompt program that reads so many tokens."""
        return min(size for size in self.prompts if size >= tokens)

    def next_chunk(self, prompt: int, position: int) -> tuple[int, int, int]:
        """The first token, the end and the program's length of the chunk that continues a prompt of so many tokens.

        It depends on the prompt alone, never on what else is served: equal prompts are read by equal programs. At the
        end of the cache, where no program fits behind the position, the chunk begins earlier and reads tokens again.
        """
        end = min(position + self.chunk, prompt)
        length = self.length_for(end - position)
        return min(position, self.capacity - length), end, length


class Decoder:
    """A decoder's programs in a session, by tokens and positions."""

    def __init__(
        self, programs: DecoderPrograms, session: Session, latency_ms: Callable[[str], float | None] = lambda _: None
    ) -> None:
        """`latency_ms` predicts the duration of a program."""
        self.programs, self._session, self.latency_ms = programs, session, latency_ms

    def extend(self, row: int, tokens: Sequence[int], position: int, length: int) -> "Array":
        """Read a chunk into a row; the logits behind its last token."""
        ids, mask = _padded(tokens, length)
        given = {"input_ids": ids[None], "attention_mask": mask[None]}
        given |= {"row": np.array([row]), "position": np.array([position])}
        return np.asarray(self._run(self.programs.prompts[length], given)[0])

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> "Array":
        """Read the prompts of a batch, by row; the logits behind the last token of each row. Other rows are lost."""
        length = self.programs.length_for(max(map(len, prompts.values())))
        rows = [_padded(prompts.get(row, (0,)), length) for row in range(self.programs.rows)]
        given = {"input_ids": np.stack([ids for ids, _ in rows]), "attention_mask": np.stack([own for _, own in rows])}
        return self._run(self.programs.prompts[length], given)

    def decode(self, tokens: "Array", positions: "Array") -> "Array":
        """Read a token in each row; the logits behind it."""
        return self._run(self.programs.decode, {"input_ids": tokens[:, None], "position": positions})

    def close(self) -> None:
        self._session.close()

    def _run(self, program: str, given: "Mapping[str, Array]") -> "Array":
        return np.asarray(self._session.run(program, given)["logits"][:, 0])


def _padded(tokens: Sequence[int], length: int) -> "tuple[Array, Array]":
    ids, mask = np.zeros(length, np.int64), np.zeros(length, np.int64)
    ids[: len(tokens)] = tokens
    mask[: len(tokens)] = 1
    return ids, mask
