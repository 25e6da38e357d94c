"""FSx file systems: the scratch storage of training fleets."""

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import removed_tags, shaped, tags


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

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        fsx = site.client("fsx")
        file_system = fsx.create_file_system(**shaped(fsx, "create_file_system", desired))["FileSystem"]
        lustre = file_system.get("LustreConfiguration", {})
        return PhysicalResource(
            file_system["FileSystemId"],
            {
                "DNSName": file_system["DNSName"],
                "LustreMountName": lustre.get("MountName"),
                "ResourceARN": file_system["ResourceARN"],
            },
            {"SecurityGroupIds": desired.get("SecurityGroupIds")},  # FSx returns them only as network interfaces
        )

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        fsx, arn = site.client("fsx"), resource.attributes["ResourceARN"]
        if names := removed_tags(before, desired):
            fsx.untag_resource(ResourceARN=arn, TagKeys=names)
        fsx.tag_resource(ResourceARN=arn, Tags=tags(desired))
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("fsx").delete_file_system(FileSystemId=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        fsx = site.client("fsx")
        file_system = fsx.describe_file_systems(FileSystemIds=[resource.id])["FileSystems"][0]
        return {
            **file_system,
            **resource.state,
            "Tags": fsx.list_tags_for_resource(ResourceARN=resource.attributes["ResourceARN"])["Tags"],
        }
