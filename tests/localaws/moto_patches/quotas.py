"""Service quotas of EC2 and SageMaker, and the default key of EBS; an increase is granted at once.

A new account has AWS's defaults: none for Inferentia and Trainium.
"""

import json
from hashlib import sha256
from typing import Any, Final

from moto.core.responses import ActionResult
from moto.ec2.responses import EC2Response
from moto.servicequotas.responses import ServiceQuotasResponse

from nxpipe.pipeline.config.endpoints import HOSTED

_PAGE: Final = 5
_DEFAULTS: Final[dict[str, dict[str, tuple[str, float]]]] = {
    "ec2": {
        "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances": ("L-1216C47A", 5.0),
        "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests": ("L-34B43A08", 5.0),
        "Running On-Demand Inf instances": ("L-1945791B", 0.0),
        "All Inf Spot Instance Requests": ("L-B5D1601B", 0.0),
        "Running On-Demand Trn instances": ("L-2C3B7624", 0.0),
        "All Trn Spot Instance Requests": ("L-6B0D517C", 0.0),
        "Running On-Demand G and VT instances": ("L-DB2E81BA", 0.0),
        "Running On-Demand P instances": ("L-417A185B", 0.0),
    },
    "sagemaker": {
        f"{name} for endpoint usage": (f"L-{sha256(name.encode()).hexdigest()[:8].upper()}", 0.0) for name in HOSTED
    },
}


def list_service_quotas(self: ServiceQuotasResponse) -> str:
    """The applied quotas, as for EC2 on AWS; those of SageMaker are listed once they were increased."""
    service = _parameters(self)["ServiceCode"]
    applied = {code for code in _applied(self) if service == "sagemaker"}
    return _listed(
        self, [entry for entry in _entries(self, service) if service == "ec2" or entry["QuotaCode"] in applied]
    )


def list_aws_default_service_quotas(self: ServiceQuotasResponse) -> str:
    return _listed(self, _entries(self, _parameters(self)["ServiceCode"], defaults=True))


def request_service_quota_increase(self: ServiceQuotasResponse) -> str:
    request = _parameters(self)
    _applied(self)[request["QuotaCode"]] = request["DesiredValue"]
    return json.dumps({"RequestedQuota": {**request, "Status": "APPROVED"}})


def _parameters(self: ServiceQuotasResponse) -> dict[str, Any]:
    parameters: dict[str, Any] = json.loads(self.body)
    return parameters


def _applied(self: ServiceQuotasResponse) -> dict[str, float]:
    applied: dict[str, float] = vars(self.backend).setdefault("applied_quotas", {})
    return applied


def _entries(self: ServiceQuotasResponse, service: str, *, defaults: bool = False) -> list[dict[str, Any]]:
    applied = {} if defaults else _applied(self)
    return [
        {"ServiceCode": service, "QuotaCode": code, "QuotaName": name, "Value": applied.get(code, value)}
        for name, (code, value) in _DEFAULTS.get(service, {}).items()
    ]


def _listed(self: ServiceQuotasResponse, entries: list[dict[str, Any]]) -> str:
    start = int(_parameters(self).get("NextToken", 0))
    more = {"NextToken": str(start + _PAGE)} if start + _PAGE < len(entries) else {}
    return json.dumps({"Quotas": entries[start : start + _PAGE], **more})


def get_ebs_default_kms_key_id(self: EC2Response) -> ActionResult:
    return ActionResult({"KmsKeyId": vars(self.ec2_backend).get("chosen_ebs_key", "alias/aws/ebs")})


def modify_ebs_default_kms_key_id(self: EC2Response) -> ActionResult:
    vars(self.ec2_backend)["chosen_ebs_key"] = self._get_param("KmsKeyId")
    return get_ebs_default_kms_key_id(self)


def apply() -> None:
    for call in (list_service_quotas, list_aws_default_service_quotas, request_service_quota_increase):
        setattr(ServiceQuotasResponse, call.__name__, call)
    for action in (get_ebs_default_kms_key_id, modify_ebs_default_kms_key_id):
        setattr(EC2Response, action.__name__, action)
