"""Findings of the packs that the stacks themselves accept, each with the decision behind it.

They stand in the code because they are true of every project; what only one project accepts is in its nxpipe.toml.
"""

from typing import Final

from nxpipe.stacks.rules.acceptance import Accepted

_NIST: Final = "NIST.800.53.R5-"
_SOLUTIONS: Final = "AwsSolutions-"
_CHECKOV: Final = "CKV_AWS_"  # judged by `make audit`

# Pack and rule, where, why.
_DECISIONS: Final = (
    (_CHECKOV, "115", "*-rollout-*/JudgeFunction*", "one machine calls it, once at a time"),
    (_CHECKOV, "116", "*-rollout-*/JudgeFunction*", "whoever calls it waits for the answer, and tries again himself"),
    (_CHECKOV, "117", "*-rollout-*/JudgeFunction*", "it calls nobody; inside of a network it could"),
    (_CHECKOV, "119", "*-rollout-*/Record*", "which version has which weight: no secret, and AWS's own key is on it"),
    (_CHECKOV, "158", "*", "addresses and progress: no secrets, and CloudWatch's key is on them"),
    (_CHECKOV, "18", "*-storage/Logs*", "it is where access logs go; its own would never end"),
    (_SOLUTIONS, "AS3", "*-serve-*", "groups change by rollouts and schedules, and alarms tell of what goes wrong"),
    (_SOLUTIONS, "EC26", "*-serve-*", "the pack cannot follow the launch template, whose volumes are encrypted"),
    (_SOLUTIONS, "EKS1", "*-cluster/Cluster", "listed addresses reach the API, and NXP-NET-1 refuses a list of all"),
    (_SOLUTIONS, "IAM4", "*-cluster/*", "what EKS, its nodes and its network call changes: AWS keeps their policies"),
    (_SOLUTIONS, "IAM4", "*/InstanceRole/Resource", "the agent of ECS changes what it calls: AWS keeps its policy"),
    (_SOLUTIONS, "IAM5", "*-build-farm/Submitting/Resource", "reads without ARNs; ends jobs of the project's tag"),
    (_SOLUTIONS, "IAM5", "*-cluster/Artifacts/DefaultPolicy/Resource", "objects below one prefix of one bucket"),
    (_SOLUTIONS, "IAM5", "*/Publishing/Resource", "objects below one prefix of one bucket, by listed actions"),
    (_SOLUTIONS, "IAM5", "*-endpoint-*/Role/*", "reads below one prefix, has interfaces in our subnets and one log"),
    (_SOLUTIONS, "IAM5", "*-release/*Policy/Resource", "objects below one prefix of one bucket, by listed actions"),
    (_SOLUTIONS, "IAM5", "*-rollout-*/Roles/*", "reads without ARNs; executions of one machine, one folder"),
    (_SOLUTIONS, "IAM5", "*-serve-*/Role/DefaultPolicy/Resource", "reads below one prefix, answers one group's hooks"),
    (_SOLUTIONS, "IAM5", "*-train-*/JobRole/DefaultPolicy/Resource", "objects below listed prefixes of two buckets"),
    (_SOLUTIONS, "L1", "*-rollout-*/Judge/*", "it changes by decision: what was judged is judged alike"),
    (_SOLUTIONS, "SF1", "*-rollout-*", "histories stay 90 days, evidence longer; logs take writes to *"),
    (_SOLUTIONS, "SF2", "*-rollout-*", "a history has each call with its times, nothing is below"),
    (_NIST, "ALBHttpToHttpsRedirection", "*-serve-*", "NXP-NET-3 asks for TLS: a project accepts that, or has it"),
    (_NIST, "ALBWAFEnabled", "*-serve-*", "the balancer has private addresses and a list of callers"),
    (_NIST, "CloudWatchAlarmAction", "*-endpoint-*", "it takes calls back, and tells through its composite alarm"),
    (_NIST, "CloudWatchAlarmAction", "*-observe/*", "it acts through the composite alarm of its fleet"),
    (_NIST, "CloudWatchAlarmAction", "*-serve-*", "it ends instance refreshes, which watch it by name"),
    (_NIST, "CloudWatchLogGroupEncrypted", "*", "addresses and progress: no secrets, and CloudWatch's key is on them"),
    (_NIST, "DynamoDBInBackupPlan", "*-rollout-*", "one item, which each rollout writes anew from the rule itself"),
    (_NIST, "EC2IMDSv2Enabled", "*-serve-*", "the pack cannot follow the launch template; NXP-HOST-1 does"),
    (_NIST, "EC2RestrictedCommonPorts", "*-network/EfaIn", "collectives take all ports, from the group itself only"),
    (_NIST, "EFSInBackupPlan", "*-cache/*", "a cache: all that it holds is in the artifact bucket"),
    (_NIST, "ELBDeletionProtectionEnabled", "*-serve-*", "it holds nothing, and a destroyed fleet must cost nothing"),
    (_NIST, "ELBv2ACMCertificateRequired", "*-serve-*", "NXP-NET-3 asks for TLS: a project accepts that, or has it"),
    (_NIST, "IAMNoInlinePolicy", "*", "a grant belongs to one role, and goes when the role goes"),
    (_NIST, "LambdaConcurrency", "*-rollout-*/Judge/*", "one machine calls it, once at a time"),
    (_NIST, "LambdaDLQ", "*-rollout-*/Judge/*", "whoever calls it waits for the answer, and tries again himself"),
    (_NIST, "LambdaInsideVPC", "*-rollout-*/Judge/*", "it calls nobody; inside of a network it could"),
    (_NIST, "S3BucketReplicationEnabled", "*-storage/*", "replicas of a store are stores of their own ([store])"),
    (_NIST, "S3BucketReplicationEnabled", "*-train-*/Checkpoints/*", "a job that goes on in its zone reads them there"),
    (_NIST, "S3DefaultEncryptionKMS", "*-storage/Logs/*", "S3 writes access logs by its own key only"),
    (_NIST, "VPCDefaultSecurityGroupClosed", "*-network/*", "it takes a custom resource, and nothing joins the group"),
    (_NIST, "VPCNoUnrestrictedRouteToIGW", "*-network/Vpc/way-out*", "only where [network] asks for it, for NAT alone"),
)

ACKNOWLEDGED: Final = tuple(
    Accepted(f"{pack}{rule}", resource, reason, optional=True) for pack, rule, resource, reason in _DECISIONS
)
