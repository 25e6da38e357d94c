"""User data: shell scripts that run at an instance's first boot; variables of the fleet are prepended.

The scripts are files of their own and stay as they are; what differs between fleets stands before them, as variables.
"""
