"""CDK stacks: what the project runs on in AWS. Only app.py knows which world they are made for."""
