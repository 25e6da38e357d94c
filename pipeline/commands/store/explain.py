"""`nxpipe store explain`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli import Command
from pipeline.config import load_config
from pipeline.nearness import difference_table, differences_as_json, name_of
from pipeline.options import config_option, store_option
from pipeline.order_options import order_options, orders, refuse_words_without_effect
from pipeline.output import Console
from pipeline.saved import SavedProgram, axis_option, saved_program
from pipeline.store_url import open_the_store

if TYPE_CHECKING:
    from artifact_store import Store
    from artifact_store.index.nearest import Near
    from pipeline.order import Order


@click.command(cls=Command)
@click.argument("name", required=False)
@order_options("explain")
@axis_option
@click.option(
    "--nearest",
    "count",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    metavar="N",
    help="How many artifacts to compare with.",
)
@store_option
@config_option
@click.pass_context
def explain(
    ctx: click.Context,
    /,
    name: str | None,
    config_path: Path,
    store: str | None,
    model_id: str | None,
    names: tuple[str, ...],
    axes: tuple[tuple[str, int], ...],
    count: int,
    **flags: Any,
) -> None:
    """Say why a build is not answered by the store: the nearest artifacts, field by field.

    Takes the options of `nxpipe build`, and says what that build would find. With NAME (a model's id, MODEL@KEY, or a
    key) an artifact of the store is compared with the others.

    \b
    Example:
      nxpipe store explain --model-id bert-base-uncased --weights random:0 --autocast all
      nxpipe store explain bert-base-uncased@4e9ce0 --nearest 3
    """
    from artifact_store.index.nearest import nearest
    from pipeline.garbage import no_collection

    console: Console = ctx.obj
    refuse_words_without_effect(ctx, model_id, flags)
    if name is not None and (model_id or names):
        raise click.UsageError("NAME is an artifact of the store, and --model-id or --only a build; pass one", ctx)
    opened = open_the_store(store, config_path, console)
    with no_collection():
        if name is None:
            described = load_config(config_path, os.environ, missing_ok=model_id is not None)
            file = saved_program(ctx, model_id, flags, axes)
            asked = orders(model_id, flags, described, names, config_path.parent)
            questions = [_of_build(opened, order, file) for order in asked]
        else:
            questions = [_of_artifact(opened, name)]
        explained = [(one, nearest(opened, one.inputs, count=count, report=console.detail)) for one in questions]
    if console.json:
        console.data([_as_json(one, found) for one, found in explained])
    else:
        console.result("\n\n".join(_as_text(one, found, opened.url) for one, found in explained))


@dataclass(frozen=True)
class _Question:
    model: str
    key: str
    inputs: dict[str, object]
    answered: bool


def _of_artifact(store: "Store", name: str) -> _Question:
    published = store.resolve(name)
    return _Question(published.model_id, published.request_key, store.key_inputs(published.manifest), answered=True)


def _of_build(store: "Store", order: "Order", file: SavedProgram | None) -> _Question:
    from artifact_store.canonical import canonical_json
    from artifact_store.digest import sha256_hex
    from pipeline.saved_request import SavedRequest

    request = order.request() if file is None else SavedRequest.of(file, order)
    inputs = request.key_inputs()
    key = sha256_hex(canonical_json(inputs))
    return _Question(request.source.id, key, inputs, answered=store.find(key) is not None)


def _as_json(question: _Question, found: "list[Near]") -> dict[str, object]:
    return {
        "model": question.model,
        "request_key": question.key,
        "in_store": question.answered,
        "nearest": [
            {
                "request_key": near.published.request_key,
                "model": near.published.model_id,
                "target": near.published.target,
                "fields": near.fields,
                "differences": differences_as_json(near.differences, "stored", "wanted"),
            }
            for near in found
        ],
    }


def _as_text(question: _Question, found: "list[Near]", url: str) -> str:
    from artifact_store.names import SHOWN

    there = "is" if question.answered else "is not"
    headline = f"{question.model}@{question.key[:SHOWN]} {there} in {url}"
    if not found:
        return f"{headline}, and no other artifact is to compare it with"
    return "\n\n".join([headline, *map(_compared, found)])


def _compared(near: "Near") -> str:
    count = len(near.differences)
    return (
        f"{name_of(near)} differs in {count} of {near.fields} fields\n"
        f"{difference_table(near.differences, 'stored', 'wanted')}"
    )
