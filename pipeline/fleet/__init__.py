"""Templates from where they are: files, a folder that CDK has written, or the stacks of an account."""
