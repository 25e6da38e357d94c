"""What turns a request into programs: nxpipe's own compiler, or AWS's. Both fill the same artifact."""
