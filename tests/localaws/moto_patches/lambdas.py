"""Python functions: each call runs in a process of its own, with the content of its archive only.

Functions call the local AWS that invokes them. If it is not a server, one is started for them.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

from moto.awslambda.models import LambdaFunction

from tests.localaws.moto_patches._around import around

_RUN: Final = """
import importlib, json, os, sys, traceback
sys.path.insert(0, os.getcwd())
module, name = os.environ["_HANDLER"].rsplit(".", 1)
class Context:
    function_name = os.environ["AWS_LAMBDA_FUNCTION_NAME"]
    aws_request_id = "00000000-0000-4000-8000-000000000000"
try:
    result = getattr(importlib.import_module(module.replace("/", ".")), name)(json.load(sys.stdin), Context())
    answer, code = json.dumps(result), 0
except Exception as error:
    trace = traceback.format_exc().splitlines()
    answer, code = json.dumps({"errorMessage": str(error), "errorType": type(error).__name__, "stackTrace": trace}), 1
with open(sys.argv[1], "w") as out:
    out.write(answer)
sys.exit(code)
"""


class Subnets:
    """The network of functions in a VPC: a proxy that knows the load balancers; without one, they reach nothing new."""

    proxy: ClassVar[str | None] = None


def apply() -> None:
    around(LambdaFunction, "_invoke_lambda", _invoke)
    around(LambdaFunction, "invoke", _report_unhandled)
    around(LambdaFunction, "__init__", _keep)
    around(LambdaFunction, "get_configuration", _describe)
    around(LambdaFunction, "update_configuration", _change)


_KEPT: Final = ("LoggingConfig",)
_CHANGED: Final = {"TracingConfig": "tracing_config", "KMSKeyArn": "kms_key_arn"}


def _keep(stock: Any, function: LambdaFunction, account_id: str, spec: Any, *args: Any, **more: Any) -> None:
    stock(function, account_id, spec, *args, **more)
    vars(function)["kept"] = {key: spec[key] for key in _KEPT if key in spec}
    if group := spec.get("LoggingConfig", {}).get("LogGroup"):
        function.logs_group_name = group


def _describe(stock: Any, function: LambdaFunction, *args: Any, **more: Any) -> dict[str, Any]:
    return {**stock(function, *args, **more), **vars(function).get("kept", {})}


def _change(stock: Any, function: LambdaFunction, updates: dict[str, Any]) -> Any:
    vars(function)["kept"].update({key: updates[key] for key in _KEPT if key in updates})
    for key, attribute in _CHANGED.items():
        if key in updates:
            setattr(function, attribute, updates[key])
    if "EphemeralStorage" in updates:
        function.ephemeral_storage = updates["EphemeralStorage"]["Size"]
    return stock(function, updates)


def _report_unhandled(stock: Any, function: LambdaFunction, body: Any, request_headers: Any, headers: Any) -> Any:
    result = stock(function, body, request_headers, headers)
    if "x-amz-function-error" in headers:
        headers["x-amz-function-error"] = "Unhandled"
    return result


def _invoke(_stock: Any, function: LambdaFunction, event: Any = None) -> tuple[str, bool, str]:
    """The payload, whether the function failed, and its log."""
    if not (function.run_time or "").startswith("python"):
        message = f"the local AWS runs only Python functions, not {function.run_time}"
        return json.dumps({"errorType": "Runtime.InvalidRuntime", "errorMessage": message}), True, ""
    with tempfile.TemporaryDirectory() as folder:
        code, output = Path(folder, "code"), Path(folder, "answer")
        zipfile.ZipFile(io.BytesIO(function.code_bytes)).extractall(code)
        try:
            ended = subprocess.run(
                [sys.executable, "-c", _RUN, str(output)],
                input=json.dumps({} if event is None else event),
                capture_output=True,
                cwd=code,
                env=_environment(function),
                text=True,
                timeout=float(function.timeout),
                check=False,
            )
        except subprocess.TimeoutExpired:
            message = f"Task timed out after {float(function.timeout):.2f} seconds"
            return json.dumps({"errorType": "Sandbox.Timedout", "errorMessage": message}), True, message
        logs = ended.stdout + ended.stderr
        function.logs_backend.ensure_log_group(function.logs_group_name)
        function.save_logs(logs)
        if not output.exists():
            message = f"Runtime exited with error: exit status {ended.returncode}"
            return json.dumps({"errorType": "Runtime.ExitError", "errorMessage": message}), True, logs
        return output.read_text(), ended.returncode != 0, logs


def _environment(function: LambdaFunction) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "AWS_ACCESS_KEY_ID": "local",
        "AWS_SECRET_ACCESS_KEY": "local",
        "AWS_DEFAULT_REGION": function.region,
        "AWS_REGION": function.region,
        "AWS_ENDPOINT_URL": os.environ.get("AWS_ENDPOINT_URL") or _server(),
        "AWS_LAMBDA_FUNCTION_NAME": function.function_name,
        "_HANDLER": str(function.handler),
        **({"http_proxy": Subnets.proxy} if Subnets.proxy else {}),
        **{name: str(value) for name, value in function.environment_vars.items()},
    }


@cache
def _server() -> str:
    """A server in this process, which shares the state of the test that runs in it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    return f"http://{host}:{port}"
