"""Where moto's server finds the service."""

from tests.localaws.formation.service import Service

url_bases = [r"https?://cloudformation\.(.+)\.amazonaws\.com"]
url_paths = {"{0}/$": Service.dispatch}
