"""URLs of the service in moto's server."""

from tests.localaws.formation.service import Service

url_bases = [r"https?://cloudformation\.(.+)\.amazonaws\.com"]
url_paths = {"{0}/$": Service.dispatch}
