"""CDK stacks of the product. Only app.py composes them; a stack takes what it needs as handles."""
