"""Storage backends: a folder or an S3 bucket behind one protocol."""
