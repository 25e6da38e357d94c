"""The agent: on an instance of a fleet, it brings the artifact, proves the machine, and lets the server begin."""
