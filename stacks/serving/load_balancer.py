"""Load balancer of a fleet: listener, blue and green target groups, the listener rule with the traffic weights, the
endpoint service for callers by PrivateLink, and the probe that calls it in a smoke test.
"""

from collections.abc import Mapping
from ipaddress import ip_network
from typing import Any, Final

from aws_cdk import CfnOutput, Duration, Stack, aws_cloudwatch, aws_ec2, aws_iam, aws_lambda
from aws_cdk import aws_elasticloadbalancingv2 as elb
from aws_cdk import aws_elasticloadbalancingv2_targets as elb_targets
from constructs import Construct

from nxpipe.pipeline.config import ServingFleet
from nxpipe.pipeline.config.load_balancer import HEALTHY_STATUS, PrivateLink
from nxpipe.stacks.handles import NetworkHandle, ServeHandle, StoreHandle
from nxpipe.stacks.measures import FAILED, RESPONSES
from nxpipe.stacks.names import PROBE
from nxpipe.stacks.project import log_group, tag_project
from nxpipe.stacks.references import by_value

COLOUR_HEADER: Final = "x-nxpipe-group"  # selects an environment for a request, regardless of the weights
_WEIGHTED_PRIORITY: Final = 100  # priority of the rule for all other requests
_INITIAL_WEIGHTS: Final = {"blue": 100, "green": 0}
_ALGORITHMS: Final = {
    "least-outstanding-requests": elb.TargetGroupLoadBalancingAlgorithmType.LEAST_OUTSTANDING_REQUESTS,
    "weighted-random": elb.TargetGroupLoadBalancingAlgorithmType.WEIGHTED_RANDOM,
}


class Balancer(Construct):
    """Internal load balancer. It answers 404 to requests that no rule matches."""

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        fleet: ServingFleet,
        colours: tuple[str, ...],
        network: NetworkHandle,
        store: StoreHandle,
        instances: aws_ec2.SecurityGroup,
    ) -> None:
        super().__init__(scope, id_)
        self._fleet = fleet
        # Without testers: the first address of the network, which AWS assigns to no interface.
        self._testers = fleet.testers or (f"{ip_network(network.cidr).network_address}/32",)
        group = self._group(network, instances)
        self.load_balancer = elb.ApplicationLoadBalancer(
            self,
            "Balancer",
            vpc=network.vpc,
            vpc_subnets=aws_ec2.SubnetSelection(subnets=list(network.subnets.values())),
            security_group=group,
            internet_facing=False,
            drop_invalid_header_fields=True,
            idle_timeout=Duration.seconds(fleet.idle_timeout.total_seconds()),
        )
        self._log_to(store, f"balancers/{fleet.name}")
        self.listener = self._listener()
        self.target_groups = {colour: self._target_group(colour, network) for colour in colours}
        self.rule = self._rule()
        if fleet.private_link:
            Link(
                self, "Link", fleet=fleet, link=fleet.private_link, network=network, listener=self.listener, group=group
            )
        self.direct = {
            colour: self._direct_calls(number, colour, targets)
            for number, (colour, targets) in enumerate(self.target_groups.items(), 1)
        }

    def errors(self, colour: str, name: str, threshold: float) -> aws_cloudwatch.Alarm:
        """Alarm on the share of an environment's requests that failed or had no answer."""
        dimensions = {
            "LoadBalancer": self.load_balancer.load_balancer_full_name,
            "TargetGroup": self.target_groups[colour].target_group_full_name,
        }
        metrics = {key: series.metric(dimensions) for key, series in RESPONSES.items()}
        return aws_cloudwatch.Alarm(
            self,
            f"Errors-{colour}",
            alarm_name=name,
            alarm_description=f"More than {threshold:.2%} of the calls to {colour} fail",
            metric=aws_cloudwatch.MathExpression(
                expression=f"IF(requests > 0, {FAILED} / requests, 0)".format_map({key: key for key in metrics}),
                using_metrics=metrics,
                label="failed",
                period=Duration.minutes(1),
            ),
            threshold=threshold,
            comparison_operator=aws_cloudwatch.ComparisonOperator.GREATER_THAN_THRESHOLD,
            evaluation_periods=3,
            treat_missing_data=aws_cloudwatch.TreatMissingData.NOT_BREACHING,
        )

    def _group(self, network: NetworkHandle, instances: aws_ec2.SecurityGroup) -> aws_ec2.SecurityGroup:
        group = aws_ec2.SecurityGroup(
            self,
            "Group",
            vpc=network.vpc,
            description=f"Callers of fleet {self._fleet.name}",
            allow_all_outbound=False,
        )
        for client in self._fleet.clients or (network.cidr,):
            group.add_ingress_rule(aws_ec2.Peer.ipv4(client), aws_ec2.Port.tcp(self._port), "callers")
        port = aws_ec2.Port.tcp(self._fleet.port)
        group.add_egress_rule(instances, port, "calls and health checks")
        instances.add_ingress_rule(group, port, "calls and health checks")
        return group

    @property
    def _port(self) -> int:
        return _listener_port(self._fleet)

    def _listener(self) -> elb.ApplicationListener:
        not_found = elb.ListenerAction.fixed_response(404, content_type="text/plain", message_body="no such path")
        if self._fleet.certificate is None:
            return self.load_balancer.add_listener(
                "Listener", port=self._port, protocol=elb.ApplicationProtocol.HTTP, open=False, default_action=not_found
            )
        return self.load_balancer.add_listener(
            "Listener",
            port=self._port,
            protocol=elb.ApplicationProtocol.HTTPS,
            certificates=[elb.ListenerCertificate.from_arn(self._fleet.certificate)],
            ssl_policy=elb.SslPolicy.RECOMMENDED_TLS,
            open=False,
            default_action=not_found,
        )

    def _target_group(self, colour: str, network: NetworkHandle) -> elb.ApplicationTargetGroup:
        """Target group. Neuron devices serve few requests at a time, so a request goes to the instance with the fewest.

        An instance that fails fast then attracts requests until its health checks fail. Slow start cannot be combined
        with this algorithm, and anomaly mitigation needs weighted-random.
        """
        fleet, check = self._fleet, self._fleet.health_check
        weighted = fleet.routing == "weighted-random"
        return elb.ApplicationTargetGroup(
            self,
            colour,
            vpc=network.vpc,
            port=fleet.port,
            protocol=elb.ApplicationProtocol.HTTP,
            target_type=elb.TargetType.INSTANCE,
            load_balancing_algorithm_type=_ALGORITHMS[fleet.routing],
            enable_anomaly_mitigation=True if weighted else None,
            deregistration_delay=Duration.seconds(fleet.draining.total_seconds()),
            health_check=elb.HealthCheck(
                path=fleet.health,
                healthy_http_codes=str(HEALTHY_STATUS),
                interval=Duration.seconds(check.interval.total_seconds()),
                timeout=Duration.seconds(check.timeout.total_seconds()),
                healthy_threshold_count=check.healthy,
                unhealthy_threshold_count=check.unhealthy,
            ),
        )

    def _rule(self) -> elb.CfnListenerRule:
        """Listener rule with the traffic weights.

        Rollouts change the weights; the template has the initial ones. A deployment does not reset them as long as the
        rule's template text is unchanged. So the rule names only the two environments that every fleet has, and has no
        tags. NXP-KEEP-2 checks this.
        """
        weighted = [
            elb.CfnListenerRule.TargetGroupTupleProperty(
                target_group_arn=self.target_groups[colour].target_group_arn, weight=weight
            )
            for colour, weight in _INITIAL_WEIGHTS.items()
        ]
        forward = elb.CfnListenerRule.ForwardConfigProperty(
            target_groups=weighted,
            target_group_stickiness_config=elb.CfnListenerRule.TargetGroupStickinessConfigProperty(enabled=False),
        )
        every = elb.CfnListenerRule.PathPatternConfigProperty(values=["*"])
        rule = elb.CfnListenerRule(
            self,
            "Weights",
            listener_arn=self.listener.listener_arn,
            priority=_WEIGHTED_PRIORITY,
            conditions=[
                elb.CfnListenerRule.RuleConditionProperty(field="path-pattern", path_pattern_config=every),
            ],
            actions=[elb.CfnListenerRule.ActionProperty(type="forward", forward_config=forward)],
        )
        rule.add_property_deletion_override("Tags")
        return rule

    def _direct_calls(self, priority: int, colour: str, targets: elb.ApplicationTargetGroup) -> elb.CfnListenerRule:
        """Listener rule for requests with the environment header, which test a version before it has traffic.

        A request to an environment without instances is a 503, which rolls a rollout back. So the header works for
        `testers` only.
        """
        header = elb.CfnListenerRule.HttpHeaderConfigProperty(http_header_name=COLOUR_HEADER, values=[colour])
        source = elb.CfnListenerRule.SourceIpConfigProperty(values=[*self._testers])
        return elb.CfnListenerRule(
            self,
            f"Direct-{colour}",
            listener_arn=self.listener.listener_arn,
            priority=priority,
            conditions=[
                elb.CfnListenerRule.RuleConditionProperty(field="http-header", http_header_config=header),
                elb.CfnListenerRule.RuleConditionProperty(field="source-ip", source_ip_config=source),
            ],
            actions=[
                elb.CfnListenerRule.ActionProperty(type="forward", target_group_arn=targets.target_group_arn),
            ],
        )

    def _log_to(self, store: StoreHandle, prefix: str) -> None:
        attributes: Mapping[str, str] = {"enabled": "true", "bucket": store.logs.bucket_name, "prefix": prefix}
        for name, value in attributes.items():
            self.load_balancer.set_attribute(f"access_logs.s3.{name}", value)
        store.logs.add_to_resource_policy(
            aws_iam.PolicyStatement(
                actions=["s3:PutObject"],
                principals=[aws_iam.ServicePrincipal("logdelivery.elasticloadbalancing.amazonaws.com")],
                resources=[store.logs.arn_for_objects(f"{prefix}/AWSLogs/{Stack.of(self).account}/*")],
            )
        )


def _listener_port(fleet: ServingFleet) -> int:
    return 443 if fleet.certificate else 80


class Link(Construct):
    """Endpoint service: a network load balancer, which PrivateLink requires, in front of the fleet's own.

    It passes TCP on, so TLS ends at the fleet's load balancer, with its certificate. No inbound rule of its security
    group allows anything, and PrivateLink's connections are exempt from them: only endpoints reach it.
    """

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        fleet: ServingFleet,
        link: PrivateLink,
        network: NetworkHandle,
        listener: elb.ApplicationListener,
        group: aws_ec2.SecurityGroup,
    ) -> None:
        super().__init__(scope, id_)
        port = _listener_port(fleet)
        own = aws_ec2.SecurityGroup(
            self,
            "Group",
            vpc=network.vpc,
            description=f"PrivateLink of fleet {fleet.name}",
            allow_all_outbound=False,
        )
        own.add_egress_rule(group, aws_ec2.Port.tcp(port), "calls and health checks")
        group.add_ingress_rule(own, aws_ec2.Port.tcp(port), "PrivateLink")
        balancer = elb.NetworkLoadBalancer(
            self,
            "Balancer",
            vpc=network.vpc,
            vpc_subnets=aws_ec2.SubnetSelection(subnets=list(network.subnets.values())),
            security_groups=[own],
            enforce_security_group_inbound_rules_on_private_link_traffic=False,
            internet_facing=False,
        )
        balancer.add_listener(
            "Listener",
            port=port,
            protocol=elb.Protocol.TCP,
            default_target_groups=[self._targets(fleet, network, listener)],
        )
        service = aws_ec2.VpcEndpointService(
            self,
            "Service",
            vpc_endpoint_service_load_balancers=[balancer],
            acceptance_required=link.acceptance,
            allowed_principals=[aws_iam.ArnPrincipal(arn) for arn in link.principals],
        )
        output = CfnOutput(
            self,
            "ServiceName",
            value=service.vpc_endpoint_service_name,
            description=f"Endpoint service of {fleet.name} for callers in other networks",
        )
        output.override_logical_id("ServiceName")

    def _targets(
        self, fleet: ServingFleet, network: NetworkHandle, listener: elb.ApplicationListener
    ) -> elb.NetworkTargetGroup:
        """The fleet's load balancer as the only target; it exists before the registration, with its listener."""
        return elb.NetworkTargetGroup(
            self,
            "Targets",
            vpc=network.vpc,
            port=_listener_port(fleet),
            protocol=elb.Protocol.TCP,
            target_type=elb.TargetType.ALB,
            targets=[elb_targets.AlbListenerTarget(listener)],
            health_check=elb.HealthCheck(
                protocol=elb.Protocol.HTTPS if fleet.certificate else elb.Protocol.HTTP, path=fleet.health
            ),
        )


_PROBE: Final = """\
import hashlib, os, time, urllib.error, urllib.request

def handle(event, context):
    began = time.monotonic()
    try:
        with urllib.request.urlopen(os.environ["URL"], timeout=20) as answer:
            status, body = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read()
    seconds = round(time.monotonic() - began, 3)
    return {"status": status, "sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body), "seconds": seconds}
"""
# What Lambda itself does for a function in a VPC. Its code is denied all of them.
_INTERFACES: Final = ("ec2:CreateNetworkInterface", "ec2:DeleteNetworkInterface")
_ADDRESSES: Final = ("ec2:AssignPrivateIpAddresses", "ec2:UnassignPrivateIpAddresses")
_DESCRIPTIONS: Final = ("ec2:DescribeNetworkInterfaces", "ec2:DescribeSubnets")


class ProbeStack(Stack):
    """One request to a fleet's load balancer, which is reachable from inside of the network only.

    The function is in the fleet's subnets, may open connections to the load balancer's port in the network and to
    nothing else, and has no permission beside its log. Callers need lambda:InvokeFunction.
    """

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        project: str,
        fleet: ServingFleet,
        serve: ServeHandle,
        network: NetworkHandle,
        **kwargs: Any,
    ) -> None:
        super().__init__(scope, id_, description=f"Probe of fleet {fleet.name} of {project}", **kwargs)
        port, scheme = _listener_port(fleet), "https" if fleet.certificate else "http"
        group = aws_ec2.SecurityGroup(
            self, "Group", vpc=network.vpc, description=f"Probe of fleet {fleet.name}", allow_all_outbound=False
        )
        group.add_egress_rule(aws_ec2.Peer.ipv4(network.cidr), aws_ec2.Port.tcp(port), "the load balancer")
        logs = log_group(self, "Log")
        role = self._role()
        logs.grant_write(role)
        name = by_value(self, serve.load_balancer.load_balancer_dns_name)
        url = f"{scheme}://{name}{fleet.health}"
        function = aws_lambda.CfnFunction(
            self,
            "Function",
            description=f"Sends one request to the load balancer of fleet {fleet.name}",
            runtime="python3.13",
            architectures=["arm64"],
            handler="index.handle",
            code=aws_lambda.CfnFunction.CodeProperty(zip_file=_PROBE),
            environment=aws_lambda.CfnFunction.EnvironmentProperty(variables={"URL": url}),
            role=role.role_arn,
            logging_config=aws_lambda.CfnFunction.LoggingConfigProperty(log_group=logs.log_group_name),
            vpc_config=aws_lambda.CfnFunction.VpcConfigProperty(
                subnet_ids=[subnet.subnet_id for subnet in network.subnets.values()],
                security_group_ids=[group.security_group_id],
            ),
            memory_size=128,
            timeout=30,
        )
        function.node.add_dependency(role)  # with its policy: Lambda checks the permissions at creation
        tag_project(self, project)
        CfnOutput(self, PROBE, value=function.ref, description="Function that sends one request")

    def _role(self) -> aws_iam.Role:
        role = aws_iam.Role(self, "Role", path="/nxpipe/", assumed_by=aws_iam.ServicePrincipal("lambda.amazonaws.com"))
        own = f"arn:{self.partition}:ec2:{self.region}:{self.account}:*/*"
        functions = f"arn:{self.partition}:lambda:{self.region}:{self.account}:function:*"
        for statement in (
            aws_iam.PolicyStatement(actions=[*_INTERFACES, *_ADDRESSES], resources=[own]),
            aws_iam.PolicyStatement(actions=[*_DESCRIPTIONS], resources=["*"]),
            aws_iam.PolicyStatement(
                effect=aws_iam.Effect.DENY,
                actions=[*_INTERFACES, *_ADDRESSES, *_DESCRIPTIONS],
                resources=["*"],
                conditions={"ArnLike": {"lambda:SourceFunctionArn": functions}},
            ),
        ):
            role.add_to_policy(statement)
        return role
