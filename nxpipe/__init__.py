"""The one import package of nxpipe: the compiler, the artifact store, the pipeline and the CDK stacks lie below it.

In a checkout the four folders stand at the top of the repository and links lead to them; a wheel has them in place.
"""
