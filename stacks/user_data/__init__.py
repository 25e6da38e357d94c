"""User data: what an instance does when it starts for the first time.

The scripts are files of their own and stay as they are; what differs between fleets stands before them, as variables.
"""
