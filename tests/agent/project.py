"""The project of an instance: one fleet, and the store that it fetches from."""

from typing import Final

CONFIG: Final = """
[project]
name = "demo"
[store]
url = "file://store"
[[models]]
name = "bert"
id = "acme/tiny-bert"
task = "fill-mask"
target = "inf2.xlarge"
[[fleets]]
kind = "serving"
name = "search"
model = "bert"
channel = "production"
instance_types = ["inf2.xlarge"]
capacity = { kind = "on-demand" }
size = { min = 1, max = 1 }
rehearsal = true
golden_inputs = false
"""
SERVERLESS: Final = f"{CONFIG}command = []\n"  # a unit of the AMI serves
