"""Findings of the packs that the stacks themselves accept, each with the decision behind it.

They stand in the code because they are true of every project; what only one project accepts is in its nxpipe.toml.
"""

from typing import Final

from stacks.rules.acceptance import Accepted

_NIST: Final = "NIST.800.53.R5-"
_SOLUTIONS: Final = "AwsSolutions-"

# Pack and rule, where, why.
_DECISIONS: Final = (
    (_SOLUTIONS, "AS3", "*-serve-*", "groups change by rollouts and schedules, and alarms tell of what goes wrong"),
    (_SOLUTIONS, "EC26", "*-serve-*", "the pack cannot follow the launch template, whose volumes are encrypted"),
    (_SOLUTIONS, "IAM4", "*/InstanceRole/Resource", "the agent of ECS changes what it calls: AWS keeps its policy"),
    (_SOLUTIONS, "IAM5", "*/Publishing/Resource", "objects below one prefix of one bucket, by listed actions"),
    (_SOLUTIONS, "IAM5", "*-serve-*/Role/DefaultPolicy/Resource", "reads below one prefix, answers one group's hooks"),
    (_SOLUTIONS, "IAM5", "*-train-*/JobRole/DefaultPolicy/Resource", "objects below listed prefixes of two buckets"),
    (_NIST, "ALBHttpToHttpsRedirection", "*-serve-*", "NXP-NET-3 asks for TLS: a project accepts that, or has it"),
    (_NIST, "ALBWAFEnabled", "*-serve-*", "the balancer has private addresses and a list of callers"),
    (_NIST, "CloudWatchAlarmAction", "*-observe/*", "it acts through the composite alarm of its fleet"),
    (_NIST, "CloudWatchAlarmAction", "*-serve-*", "it ends instance refreshes, which watch it by name"),
    (_NIST, "CloudWatchLogGroupEncrypted", "*", "addresses and progress: no secrets, and CloudWatch's key is on them"),
    (_NIST, "EC2IMDSv2Enabled", "*-serve-*", "the pack cannot follow the launch template; NXP-HOST-1 does"),
    (_NIST, "EC2RestrictedCommonPorts", "*-network/EfaIn", "collectives take all ports, from the group itself only"),
    (_NIST, "EFSInBackupPlan", "*-cache/*", "a cache: all that it holds is in the artifact bucket"),
    (_NIST, "ELBDeletionProtectionEnabled", "*-serve-*", "it holds nothing, and a destroyed fleet must cost nothing"),
    (_NIST, "ELBv2ACMCertificateRequired", "*-serve-*", "NXP-NET-3 asks for TLS: a project accepts that, or has it"),
    (_NIST, "IAMNoInlinePolicy", "*", "a grant belongs to one role, and goes when the role goes"),
    (_NIST, "S3BucketReplicationEnabled", "*-storage/*", "replicas of a store are stores of their own ([store])"),
    (_NIST, "S3DefaultEncryptionKMS", "*-storage/Logs/*", "S3 writes access logs by its own key only"),
    (_NIST, "VPCDefaultSecurityGroupClosed", "*-network/*", "it takes a custom resource, and nothing joins the group"),
)

ACKNOWLEDGED: Final = tuple(
    Accepted(f"{pack}{rule}", resource, reason, optional=True) for pack, rule, resource, reason in _DECISIONS
)
