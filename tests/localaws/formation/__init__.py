"""A CloudFormation in place of moto's; a property that it cannot deploy fails the stack."""
