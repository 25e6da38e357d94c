"""A CloudFormation that does what it says, in place of moto's."""
