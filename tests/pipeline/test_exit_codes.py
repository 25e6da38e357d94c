import importlib

import click

from nxpipe.pipeline.util import exit_codes
from nxpipe.pipeline.util.errors import ModelSourceError, PipelineError


def test_numbers_and_names_are_unique() -> None:
    assert len({row.number for row in exit_codes.TABLE}) == len(exit_codes.TABLE)
    assert len({row.name for row in exit_codes.TABLE}) == len(exit_codes.TABLE)


def test_every_error_that_the_table_names_exists() -> None:
    for row in exit_codes.TABLE:
        for error in row.errors:
            module, _, name = error.partition(":")
            assert issubclass(getattr(importlib.import_module(module), name), BaseException), error


def test_every_error_of_the_pipeline_has_an_exit_code() -> None:
    importlib.import_module("nxpipe.pipeline.serving.inference")
    apart = ("nxpipe.api", "nxpipe.pipeline.serving.server")  # no command calls it; answers over HTTP
    raised = [kind for kind in PipelineError.__subclasses__() if kind.__module__ not in apart]
    for kind in raised:
        assert any(f"{kind.__module__}:{kind.__qualname__}" in row.errors for row in exit_codes.TABLE), kind


def test_the_nearest_ancestor_decides() -> None:
    assert exit_codes.exit_code_of(click.BadParameter("x")) is exit_codes.USAGE
    assert exit_codes.exit_code_of(ModelSourceError("x")) is exit_codes.MODEL
    assert exit_codes.exit_code_of(FileNotFoundError("x")) is exit_codes.SYSTEM
    assert exit_codes.exit_code_of(ZeroDivisionError()) is None
