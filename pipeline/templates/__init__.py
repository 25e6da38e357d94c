"""The files that `nxpipe init` writes into a user's repository, and how they get there."""
