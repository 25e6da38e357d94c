"""Cases of EKS."""

from typing import Final

from tests.localaws.cases.case import NETWORK, Case, ref, role, tags

_CLUSTER: Final = {
    "Cluster": {
        "Type": "AWS::EKS::Cluster",
        "Properties": {
            "Name": "nxpipe-case",
            "RoleArn": ref("Control", "Arn"),
            "ResourcesVpcConfig": {"SubnetIds": [ref("A"), ref("B")]},
        },
    },
    "Control": role("eks"),
    **NETWORK,
}


CASES: Final = (
    Case(
        "AWS::EKS::Cluster",
        {
            "AccessConfig": {"AuthenticationMode": "API", "BootstrapClusterCreatorAdminPermissions": False},
            "BootstrapSelfManagedAddons": False,
            "ComputeConfig": {"Enabled": False},
            "EncryptionConfig": [{"Provider": {"KeyArn": "arn:aws:kms:us-east-2:1:key/x"}, "Resources": ["secrets"]}],
            "KubernetesNetworkConfig": {"IpFamily": "ipv4", "ElasticLoadBalancing": {"Enabled": False}},
            "Logging": {"ClusterLogging": {"EnabledTypes": [{"Type": "api"}, {"Type": "audit"}]}},
            "Name": "nxpipe-c",
            "ResourcesVpcConfig": {
                "EndpointPrivateAccess": True,
                "EndpointPublicAccess": False,
                "SecurityGroupIds": [ref("Group")],
                "SubnetIds": [ref("A"), ref("B")],
            },
            "RoleArn": ref("Control", "Arn"),
            "StorageConfig": {"BlockStorage": {"Enabled": False}},
            "Tags": tags(a="1"),
            "UpgradePolicy": {"SupportType": "STANDARD"},
            "Version": "1.34",
        },
        {
            "Logging": {"ClusterLogging": {"EnabledTypes": [{"Type": "audit"}]}},
            "Tags": tags(b="1"),
            "Version": "1.35",
        },
        {"Control": role("eks"), **NETWORK},
    ),
    Case(
        "AWS::EKS::Nodegroup",
        {
            "AmiType": "AL2023_x86_64_NEURON",
            "CapacityType": "ON_DEMAND",
            "ClusterName": ref("Cluster"),
            "ForceUpdateEnabled": True,
            "Labels": {"a": "1"},
            "LaunchTemplate": {"Id": ref("Template"), "Version": "1"},
            "NodeRepairConfig": {"Enabled": True},
            "NodeRole": ref("Worker", "Arn"),
            "NodegroupName": "neuron",
            "ScalingConfig": {"MinSize": 0, "DesiredSize": 0, "MaxSize": 2},
            "Subnets": [ref("A")],
            "Tags": {"a": "1"},
            "Taints": [{"Key": "aws.amazon.com/neuron", "Value": "true", "Effect": "NO_SCHEDULE"}],
            "UpdateConfig": {"MaxUnavailable": 1},
        },
        {
            "Labels": {"b": "1"},
            "ScalingConfig": {"MinSize": 0, "DesiredSize": 1, "MaxSize": 3},
            "Tags": {"b": "1"},
            "Taints": [{"Key": "other", "Effect": "NO_EXECUTE"}],
        },
        {
            "Template": {
                "Type": "AWS::EC2::LaunchTemplate",
                "Properties": {"LaunchTemplateData": {"InstanceType": "inf2.xlarge"}},
            },
            "Worker": role("ec2"),
            **_CLUSTER,
        },
    ),
    Case(
        "AWS::EKS::Addon",
        {
            "AddonName": "vpc-cni",
            "AddonVersion": "v1.20.4-eksbuild.1",
            "ClusterName": ref("Cluster"),
            "ConfigurationValues": "{}",
            "PodIdentityAssociations": [{"RoleArn": ref("Worker", "Arn"), "ServiceAccount": "aws-node"}],
            "PreserveOnDelete": False,
            "ResolveConflicts": "OVERWRITE",
            "Tags": tags(a="1"),
        },
        {
            "AddonVersion": "v1.21.0-eksbuild.1",
            "PodIdentityAssociations": [{"RoleArn": ref("Control", "Arn"), "ServiceAccount": "aws-node"}],
            "Tags": tags(b="1"),
        },
        {"Worker": role("pods.eks"), **_CLUSTER},
    ),
    Case(
        "AWS::EKS::AccessEntry",
        {
            "AccessPolicies": [
                {
                    "AccessScope": {"Type": "namespace", "Namespaces": ["serve"]},
                    "PolicyArn": "arn:aws:eks::aws:cluster-access-policy/AmazonEKSViewPolicy",
                }
            ],
            "ClusterName": ref("Cluster"),
            "PrincipalArn": ref("Worker", "Arn"),
            "Tags": tags(a="1"),
            "Type": "STANDARD",
        },
        {
            "AccessPolicies": [
                {
                    "AccessScope": {"Type": "cluster"},
                    "PolicyArn": "arn:aws:eks::aws:cluster-access-policy/AmazonEKSAdminPolicy",
                }
            ],
            "KubernetesGroups": ["viewers"],
        },
        {"Worker": role("ec2"), **_CLUSTER},
    ),
    Case(
        "AWS::EKS::PodIdentityAssociation",
        {
            "ClusterName": ref("Cluster"),
            "Namespace": "serve",
            "RoleArn": ref("Worker", "Arn"),
            "ServiceAccount": "agent",
            "Tags": tags(a="1"),
        },
        {"RoleArn": ref("Control", "Arn"), "Tags": tags(b="1")},
        {"Worker": role("pods.eks"), **_CLUSTER},
    ),
)
