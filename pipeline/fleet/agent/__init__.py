"""The agent on an instance of a serving fleet: fetches the artifact, checks the devices, starts the server."""
