"""From a description to a channel, through gates that can be repeated. docs/guides/release.md."""
