"""Channels as people see and change them: what is served, whose word there is for it, and by which rules it moves."""
