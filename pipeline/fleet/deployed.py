"""The templates of stacks as they are deployed."""

import json
from collections.abc import Callable
from typing import Any

from nxpipe.pipeline.fleet.files import parse
from nxpipe.pipeline.util.aws import asking
from nxpipe.stacks.lint.template import Template, Templates, read


def deployed(like: Templates, client: Callable[..., Any]) -> Templates:
    """Of the stacks that would be deployed, those that are there already."""
    found = (_deployed(template, client) for template in like.all)
    return Templates(tuple(each for each in found if each is not None))


def _deployed(template: Template, client: Callable[..., Any]) -> Template | None:
    from botocore.exceptions import ClientError

    cloudformation = client("cloudformation", template.region)
    with asking(f"give the template of stack {template.stack}"):
        try:
            body = cloudformation.get_template(StackName=template.stack, TemplateStage="Original")["TemplateBody"]
        except ClientError as error:
            if "does not exist" in str(error):
                return None
            raise
    text = body if isinstance(body, str) else json.dumps(body)
    return read(template.stack, parse(text, f"the deployed template of {template.stack}"), template.region)
