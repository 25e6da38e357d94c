"""Scratch of training fleets."""

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import gone, shaped, tags


@provides
class FileSystem(Provider):
    type = "AWS::FSx::FileSystem"
    properties = frozenset(
        {
            "FileSystemType",
            "FileSystemTypeVersion",
            "KmsKeyId",
            "LustreConfiguration",
            "SecurityGroupIds",
            "StorageCapacity",
            "StorageType",
            "SubnetIds",
            "Tags",
        }
    )
    fixed = properties - {"Tags"}

    def create(self, wanted: Properties, at: Site) -> Made:
        fsx = at.client("fsx")
        told = fsx.create_file_system(**shaped(fsx, "create_file_system", wanted))["FileSystem"]
        lustre = told.get("LustreConfiguration", {})
        return Made(
            told["FileSystemId"],
            {
                "DNSName": told["DNSName"],
                "LustreMountName": lustre.get("MountName"),
                "ResourceARN": told["ResourceARN"],
            },
            {"SecurityGroupIds": wanted.get("SecurityGroupIds")},  # FSx shows them by network interfaces alone
        )

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        fsx, arn = at.client("fsx"), made.attributes["ResourceARN"]
        if names := gone(before, wanted):
            fsx.untag_resource(ResourceARN=arn, TagKeys=names)
        fsx.tag_resource(ResourceARN=arn, Tags=tags(wanted))
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("fsx").delete_file_system(FileSystemId=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        fsx = at.client("fsx")
        told = fsx.describe_file_systems(FileSystemIds=[made.id])["FileSystems"][0]
        return {
            **told,
            **made.kept,
            "Tags": fsx.list_tags_for_resource(ResourceARN=made.attributes["ResourceARN"])["Tags"],
        }
