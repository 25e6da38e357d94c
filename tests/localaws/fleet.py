"""A template with each type of resource of a fleet, for tests that change one property at a time."""

import base64
from typing import Any

Template = dict[str, Any]

ZONES = ("us-east-2a", "us-east-2b")
SCRIPT = base64.b64encode(b"#!/bin/sh\nexec true\n").decode()
TAGS = [{"Key": "project", "Value": "nxpipe"}]


def ref(name: str) -> dict[str, str]:
    return {"Ref": name}


def att(name: str, attribute: str) -> dict[str, list[str]]:
    return {"Fn::GetAtt": [name, attribute]}


def resource(kind: str, /, **properties: Any) -> Template:
    return {"Type": f"AWS::{kind}", "Properties": properties}


def network() -> Template:
    document = {
        "Vpc": resource("EC2::VPC", CidrBlock="10.0.0.0/16", EnableDnsHostnames=True, EnableDnsSupport=True, Tags=TAGS),
        "Gateway": resource("EC2::InternetGateway", Tags=TAGS),
        "Attached": resource("EC2::VPCGatewayAttachment", VpcId=ref("Vpc"), InternetGatewayId=ref("Gateway")),
        "Address": resource("EC2::EIP", Domain="vpc", Tags=TAGS),
        "Nat": resource(
            "EC2::NatGateway", SubnetId=ref("SubnetA"), AllocationId=att("Address", "AllocationId"), Tags=TAGS
        ),
        "Table": resource("EC2::RouteTable", VpcId=ref("Vpc"), Tags=TAGS),
        "OtherTable": resource("EC2::RouteTable", VpcId=ref("Vpc")),
        "Out": resource(
            "EC2::Route", RouteTableId=ref("Table"), DestinationCidrBlock="0.0.0.0/0", GatewayId=ref("Gateway")
        ),
        "Joined": resource("EC2::SubnetRouteTableAssociation", RouteTableId=ref("Table"), SubnetId=ref("SubnetA")),
        "Storage": resource(
            "EC2::VPCEndpoint",
            VpcId=ref("Vpc"),
            ServiceName="com.amazonaws.us-east-2.s3",
            VpcEndpointType="Gateway",
            RouteTableIds=[ref("Table")],
            PolicyDocument={"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Principal": "*"}]},
        ),
        "Registry": resource(
            "EC2::VPCEndpoint",
            VpcId=ref("Vpc"),
            ServiceName="com.amazonaws.us-east-2.ecr.api",
            VpcEndpointType="Interface",
            PrivateDnsEnabled=True,
            SubnetIds=[ref("SubnetA"), ref("SubnetB")],
            SecurityGroupIds=[ref("Group")],
            Tags=TAGS,
        ),
        "Logs": resource("Logs::LogGroup", LogGroupName="/nxpipe/flows"),
        "OtherLogs": resource("Logs::LogGroup", LogGroupName="/nxpipe/other"),
        "FlowRole": resource("IAM::Role", AssumeRolePolicyDocument={"Version": "2012-10-17", "Statement": []}),
        "Flows": resource(
            "EC2::FlowLog",
            ResourceId=ref("Vpc"),
            ResourceType="VPC",
            TrafficType="ALL",
            LogGroupName=ref("Logs"),
            DeliverLogsPermissionArn=att("FlowRole", "Arn"),
            MaxAggregationInterval=60,
            Tags=TAGS,
        ),
        **groups(),
    }
    for name, zone, block in zip("AB", ZONES, ("10.0.0.0/24", "10.0.1.0/24"), strict=True):
        document[f"Subnet{name}"] = resource(
            "EC2::Subnet",
            VpcId=ref("Vpc"),
            AvailabilityZone=zone,
            CidrBlock=block,
            MapPublicIpOnLaunch=False,
            Tags=TAGS,
        )
    return document


def groups() -> Template:
    """Security groups as CDK and our stacks write them: inline rules, rules as resources, a group that refers to
    itself."""
    return {
        "Group": resource(
            "EC2::SecurityGroup",
            GroupDescription="serving",
            VpcId=ref("Vpc"),
            SecurityGroupIngress=[
                {"IpProtocol": "tcp", "FromPort": 8000, "ToPort": 8000, "CidrIp": "10.0.0.0/16", "Description": "in"}
            ],
            SecurityGroupEgress=[{"IpProtocol": "-1", "CidrIp": "0.0.0.0/0", "Description": "all"}],
            Tags=TAGS,
        ),
        "Efa": resource(
            "EC2::SecurityGroup",
            GroupDescription="training",
            VpcId=ref("Vpc"),
            SecurityGroupEgress=[{"IpProtocol": "icmp", "FromPort": 252, "ToPort": 86, "CidrIp": "255.255.255.255/32"}],
        ),
        "EfaIn": resource(
            "EC2::SecurityGroupIngress",
            GroupId=ref("Efa"),
            SourceSecurityGroupId=ref("Efa"),
            IpProtocol="-1",
            Description="from each other",
        ),
        "EfaOut": resource(
            "EC2::SecurityGroupEgress",
            GroupId=ref("Efa"),
            DestinationSecurityGroupId=ref("Efa"),
            IpProtocol="-1",
            Description="to each other",
        ),
    }


def launch_data(**more: Any) -> dict[str, Any]:
    return {
        "ImageId": "ami-0123456789abcdef0",
        "InstanceType": "inf2.xlarge",
        "UserData": SCRIPT,
        "IamInstanceProfile": {"Arn": att("Profile", "Arn")},
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled"},
        "BlockDeviceMappings": [
            {"DeviceName": "/dev/xvda", "Ebs": {"Encrypted": True, "VolumeSize": 200, "VolumeType": "gp3"}}
        ],
        "SecurityGroupIds": [ref("Group")],
        "TagSpecifications": [{"ResourceType": "instance", "Tags": TAGS}],
        **more,
    }


def launching() -> Template:
    card = {"Groups": [ref("Efa")], "DeleteOnTermination": True}
    interfaces = [
        {"NetworkCardIndex": 0, "DeviceIndex": 0, "InterfaceType": "efa", **card},
        *({"NetworkCardIndex": n, "DeviceIndex": 1, "InterfaceType": "efa-only", **card} for n in range(1, 16)),
    ]
    training = launch_data(
        InstanceType="trn2.48xlarge", NetworkInterfaces=interfaces, Placement={"GroupName": ref("Cluster")}
    )
    del training["SecurityGroupIds"]
    return {
        "Role": resource("IAM::Role", AssumeRolePolicyDocument={"Version": "2012-10-17", "Statement": []}),
        "Profile": resource("IAM::InstanceProfile", Roles=[ref("Role")]),
        "Template": resource(
            "EC2::LaunchTemplate",
            LaunchTemplateData=launch_data(),
            TagSpecifications=[{"ResourceType": "launch-template", "Tags": TAGS}],
            VersionDescription="serving",
        ),
        "Training": resource("EC2::LaunchTemplate", LaunchTemplateName="nxpipe-train", LaunchTemplateData=training),
        "Cluster": resource("EC2::PlacementGroup", Strategy="cluster", Tags=TAGS),
        "Reserved": resource(
            "EC2::CapacityReservation",
            AvailabilityZone=ZONES[0],
            InstanceType="trn2.48xlarge",
            InstancePlatform="Linux/UNIX",
            InstanceCount=2,
            InstanceMatchCriteria="targeted",
            EndDateType="unlimited",
            Tenancy="default",
            TagSpecifications=[{"ResourceType": "capacity-reservation", "Tags": TAGS}],
        ),
    }


def by(template: str, version: str = "LatestVersionNumber") -> dict[str, Any]:
    return {"LaunchTemplateId": ref(template), "Version": att(template, version)}


def scaling() -> Template:
    subnets = [ref("SubnetA"), ref("SubnetB")]
    blue = resource(
        "AutoScaling::AutoScalingGroup",
        MinSize="0",
        MaxSize="4",
        DesiredCapacity="2",
        LaunchTemplate=by("Template"),
        VPCZoneIdentifier=subnets,
        TargetGroupARNs=[ref("Blue")],
        HealthCheckType="ELB",
        HealthCheckGracePeriod=1800,
        Cooldown="60",
        DefaultInstanceWarmup=120,
        MaxInstanceLifetime=604800,
        NewInstancesProtectedFromScaleIn=False,
        InstanceMaintenancePolicy={"MinHealthyPercentage": 100, "MaxHealthyPercentage": 110},
        TerminationPolicies=["OldestLaunchTemplate", "Default"],
        MetricsCollection=[{"Granularity": "1Minute", "Metrics": ["GroupInServiceInstances"]}],
        Tags=[{**TAGS[0], "PropagateAtLaunch": True}],
    )
    mixed = resource(
        "AutoScaling::AutoScalingGroup",
        MinSize="0",
        MaxSize="4",
        DesiredCapacity="3",
        VPCZoneIdentifier=subnets,
        CapacityRebalance=True,
        MixedInstancesPolicy={
            "InstancesDistribution": {
                "OnDemandBaseCapacity": 1,
                "OnDemandPercentageAboveBaseCapacity": 0,
                "OnDemandAllocationStrategy": "prioritized",
                "SpotAllocationStrategy": "price-capacity-optimized",
            },
            "LaunchTemplate": {
                "LaunchTemplateSpecification": by("Template"),
                "Overrides": [{"InstanceType": "inf2.xlarge"}, {"InstanceType": "inf2.8xlarge"}],
            },
        },
    )
    block = resource(
        "AutoScaling::AutoScalingGroup",
        MinSize="0",
        MaxSize="2",
        DesiredCapacity="0",
        VPCZoneIdentifier=[ref("SubnetA")],
        LaunchTemplate=by("Training"),
    )
    return {"Blue1": blue, "Mixed": mixed, "Block": block, **_hanging_on_groups()}


def _hanging_on_groups() -> Template:
    return {
        "Ready": resource(
            "AutoScaling::LifecycleHook",
            AutoScalingGroupName=ref("Block"),
            LifecycleHookName="ready",
            LifecycleTransition="autoscaling:EC2_INSTANCE_LAUNCHING",
            DefaultResult="ABANDON",
            HeartbeatTimeout=1800,
            NotificationMetadata="fleet=chat",
        ),
        "Warm": resource(
            "AutoScaling::WarmPool",
            AutoScalingGroupName=ref("Blue1"),
            MinSize=1,
            MaxGroupPreparedCapacity=3,
            PoolState="Stopped",
            InstanceReusePolicy={"ReuseOnScaleIn": True},
        ),
        "Follow": resource(
            "AutoScaling::ScalingPolicy",
            AutoScalingGroupName=ref("Blue1"),
            PolicyType="TargetTrackingScaling",
            EstimatedInstanceWarmup=300,
            TargetTrackingConfiguration={
                "TargetValue": 60,
                "PredefinedMetricSpecification": {"PredefinedMetricType": "ASGAverageCPUUtilization"},
            },
        ),
        "Begin": resource(
            "AutoScaling::ScheduledAction",
            AutoScalingGroupName=ref("Block"),
            StartTime="2030-01-01T11:30:00Z",
            DesiredCapacity=2,
            MinSize=2,
            MaxSize=2,
        ),
    }


def balancing() -> Template:
    target = {
        "Port": 8000,
        "Protocol": "HTTP",
        "ProtocolVersion": "HTTP1",
        "TargetType": "instance",
        "VpcId": ref("Vpc"),
        "HealthCheckEnabled": True,
        "HealthCheckPath": "/health",
        "HealthCheckIntervalSeconds": 30,
        "HealthCheckTimeoutSeconds": 10,
        "HealthyThresholdCount": 2,
        "UnhealthyThresholdCount": 3,
        "Matcher": {"HttpCode": "200"},
        "TargetGroupAttributes": [{"Key": "deregistration_delay.timeout_seconds", "Value": "60"}],
        "Tags": TAGS,
    }
    weights = [
        {"TargetGroupArn": ref("Blue"), "Weight": 100},
        {"TargetGroupArn": ref("Green"), "Weight": 0},
    ]
    return {
        "Balancer": resource(
            "ElasticLoadBalancingV2::LoadBalancer",
            Name="nxpipe-chat",
            Type="application",
            Scheme="internal",
            Subnets=[ref("SubnetA"), ref("SubnetB")],
            SecurityGroups=[ref("Group")],
            LoadBalancerAttributes=[
                {"Key": "deletion_protection.enabled", "Value": "false"},
                {"Key": "routing.http.drop_invalid_header_fields.enabled", "Value": "true"},
            ],
            Tags=TAGS,
        ),
        "Blue": resource("ElasticLoadBalancingV2::TargetGroup", **target),
        "Green": resource("ElasticLoadBalancingV2::TargetGroup", **target),
        "Listener": resource(
            "ElasticLoadBalancingV2::Listener",
            LoadBalancerArn=ref("Balancer"),
            Port=80,
            Protocol="HTTP",
            DefaultActions=[{"Type": "fixed-response", "FixedResponseConfig": {"StatusCode": "404"}}],
        ),
        "Rule": resource(
            "ElasticLoadBalancingV2::ListenerRule",
            ListenerArn=ref("Listener"),
            Priority=10,
            Conditions=[{"Field": "path-pattern", "PathPatternConfig": {"Values": ["/*"]}}],
            Actions=[{"Type": "forward", "ForwardConfig": {"TargetGroups": weights}}],
            Tags=TAGS,
        ),
    }


def fleet() -> Template:
    return {**network(), **launching(), **scaling(), **balancing()}
