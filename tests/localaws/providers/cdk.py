"""The CDK's metadata resource, which creates nothing."""

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides


@provides
class Metadata(Provider):
    type = "AWS::CDK::Metadata"
    properties = frozenset({"Analytics"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        return PhysicalResource(site.name(64), desired)

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        return PhysicalResource(resource.id, desired)

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        pass  # it has no physical resource

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        return resource.attributes
