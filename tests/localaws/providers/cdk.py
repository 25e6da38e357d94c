"""What the CDK tells AWS about itself. It makes nothing."""

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides


@provides
class Metadata(Provider):
    type = "AWS::CDK::Metadata"
    properties = frozenset({"Analytics"})

    def create(self, wanted: Properties, at: Site) -> Made:
        return Made(at.name(64), wanted)

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        return Made(made.id, wanted)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        pass  # there is nothing

    def read(self, made: Made, at: Site) -> Properties:
        return made.attributes
