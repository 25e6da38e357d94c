"""Where bytes lie: a folder or a bucket, behind one protocol."""
