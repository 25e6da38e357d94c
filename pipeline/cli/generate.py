"""`nxpipe generate`: text from an artifact's programs, by the scheduler of `nxpipe serve` in this process."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from nxpipe.pipeline.cli.completion import complete_artifacts
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.model_options import execution_options
from nxpipe.pipeline.cli.options import config_option, device_option, limit_option, store_option
from nxpipe.pipeline.cli.param_types import Amount, Count, Share
from nxpipe.pipeline.cli.serve import ArtifactChoice, choice_options, machine_of
from nxpipe.pipeline.serving.text import DEFAULT_TOKENS, require_serving_libraries
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.files import MiB
from nxpipe.pipeline.verify.execution import ExecutionOptions

if TYPE_CHECKING:
    from nxpipe.pipeline.serving.model import ServingModel
    from nxpipe.pipeline.serving.sampling import SamplingParams
    from nxpipe.pipeline.serving.text_generation import TextGenerator

_LARGEST_INPUT: Final = MiB
_PROMPT: Final = "> "


@click.command(cls=Command)
@click.argument("artifact", required=False, shell_complete=complete_artifacts)
@click.argument("prompt", required=False)
@choice_options("Use")
@click.option("--chat", is_flag=True, help="Answer by the model's chat template; without PROMPT, a conversation.")
@click.option("--system", metavar="TEXT", help="With --chat: the system message.")
@click.option(
    "--max-tokens",
    type=Count(1),
    default=DEFAULT_TOKENS,
    show_default=True,
    metavar="N",
    help="The number of tokens to generate at most.",
)
@click.option(
    "--temperature",
    type=Amount(0, 2),
    default=0.0,
    show_default=True,
    help="0 takes the likeliest token; higher values draw from more of them.",
)
@click.option("--top-p", type=Share(zero=False), help="Draw from the likeliest tokens of this share.")
@click.option("--top-k", type=Count(0), metavar="N", help="Draw from the N likeliest tokens.")
@click.option("--seed", type=Count(0), metavar="N", help="Draw the same tokens in every run.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@execution_options
@device_option
@limit_option
@store_option
@config_option
@click.pass_context
def generate(
    ctx: click.Context,
    /,
    artifact: str | None,
    prompt: str | None,
    channel: str | None,
    model: str | None,
    target: str | None,
    folder: Path | None,
    chat: bool,
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: tuple[str, ...],
    execution: ExecutionOptions,
    device: str | None,
    limit: float,
    store: str | None,
    config_path: Path,
) -> None:
    """Generate text with an artifact's programs, or chat with it.

    PROMPT is a text for the model's own tokenizer, or token ids as a JSON list; without it, the prompt is read from
    stdin. The prompt runs in the smallest buckets that hold it, on the emulator, or with --device on this machine's
    Neuron devices. The text goes to stdout as it is generated. With --chat and a terminal, each line is a message of a
    conversation; Ctrl-D ends it. Needs nxpipe[serve], and no PyTorch.

    \b
    Example:
      nxpipe generate my-llama@4e9ce0 "The river rose in the night" --max-tokens 40
      nxpipe generate my-llama@4e9ce0 --chat
      echo "Write a haiku." | nxpipe generate --channel production --chat
    """
    if artifact is not None and prompt is None and (channel is not None or folder is not None):
        artifact, prompt = None, artifact  # the one word is the prompt
    choice = ArtifactChoice(artifact, channel, model, target, folder, store, config_path)
    choice.require_one(ctx)
    if system is not None and not chat:
        raise click.UsageError("--system is a message of a chat; pass --chat too", ctx)
    require_serving_libraries()
    from nxpipe.pipeline.serving.sampling import SamplingParams

    given = {name: value for name, value in (("top_p", top_p), ("top_k", top_k), ("seed", seed)) if value is not None}
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, stop=stop, **given)  # type: ignore[arg-type]
    prompts = [] if prompt is None else [prompt]
    with choice.open(ctx.obj, machine_of(ctx, execution, device, limit)) as model_read:
        answer_texts(model_read, prompts, params, ctx.obj, chat=chat, system=system)


def answer_texts(
    model: "ServingModel",
    prompts: Sequence[str],
    params: "SamplingParams",
    console: Console,
    *,
    chat: bool,
    system: str | None = None,
) -> None:
    """Answer each prompt by itself; without one, the prompt on stdin, or the messages of a conversation."""
    from nxpipe.pipeline.serving.text_generation import TextGenerator

    generator = _Generator(TextGenerator(model, model.scheduler(smallest=True)), params, console)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    if chat and not prompts and sys.stdin.isatty():
        _converse(generator, messages, console)
        return
    results = []
    for text in prompts or [_standard_input()]:
        tokens = model.text.chat([*messages, {"role": "user", "content": text}]) if chat else _tokens(text, model)
        results.append(generator.answer(tokens))
    if console.json:
        console.data(results)


def _converse(generator: "_Generator", messages: list[dict[str, Any]], console: Console) -> None:
    """A conversation on a terminal, a message a line."""
    while True:
        try:
            message = input(_PROMPT)
        except EOFError:
            console.stream("\n")
            return
        if message.strip():
            messages.append({"role": "user", "content": message})
            try:
                answer = generator.answer(generator.text.model.text.chat(messages))["text"]
            except InputInvalid as error:  # the conversation is full
                console.complain(str(error))
                del messages[-1]
                continue
            messages.append({"role": "assistant", "content": answer})


@dataclass(frozen=True)
class _Generator:
    """Answers to prompts, printed as they come."""

    text: "TextGenerator"
    params: "SamplingParams"
    console: Console

    def answer(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Print the answer to a prompt as it comes; it as a document."""
        before = self.text.scheduler.counts.predicted_ms
        stream = self.text.stream(tokens, self.params)
        for part in stream:
            if not self.console.json:
                self.console.stream(part)
        answer = stream.answer
        if not self.console.json:
            self.console.stream("\n")
            predicted = self.text.scheduler.counts.predicted_ms - before
            each = (answer.seconds - answer.first_token_seconds) / max(len(answer.tokens) - 1, 1) * 1e3
            emulated = f"; {predicted:.1f} ms predicted for this program on the device" if predicted else ""
            self.console.say(
                f"  {answer.prompt_tokens} tokens read in {answer.first_token_seconds * 1e3:.0f} ms, "
                f"{len(answer.tokens)} generated, {each:.1f} ms each{emulated}"
            )
        return {
            "text": answer.text,
            "tokens": list(answer.tokens),
            "prompt_tokens": answer.prompt_tokens,
            "finish": answer.finish,
            "seconds": round(answer.seconds, 3),
        }


def _tokens(text: str, model: "ServingModel") -> list[int]:
    """The token ids of a prompt: those of a JSON list, or of the tokenizer."""
    from nxpipe.pipeline.models.prompts import as_ids

    ids = as_ids(text)
    return model.text.encode(text) if ids is None else ids


def _standard_input() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise InputInvalid("there is no prompt; pass PROMPT, or --chat for a conversation")
    text = sys.stdin.read(_LARGEST_INPUT + 1)
    if len(text) > _LARGEST_INPUT:
        raise InputInvalid(f"the prompt on stdin has more than {_LARGEST_INPUT:,} characters; pass a shorter one")
    return text.rstrip("\n")
