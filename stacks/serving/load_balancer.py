"""Load balancer of a fleet: listener, blue and green target groups, and the listener rule with the traffic weights."""

from collections.abc import Mapping
from ipaddress import ip_network
from typing import Final

from aws_cdk import Duration, Stack, aws_cloudwatch, aws_ec2, aws_iam
from aws_cdk import aws_elasticloadbalancingv2 as elb
from constructs import Construct

from nxpipe.pipeline.config import ServingFleet
from nxpipe.stacks.handles import NetworkHandle, StoreHandle
from nxpipe.stacks.observability import FAILED, RESPONSES

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
        return 443 if self._fleet.certificate else 80

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
                healthy_http_codes="200",
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
