"""Errors of CloudFormation with its own codes; the CDK shows these texts to its user."""

from moto.core.exceptions import ServiceException


class Invalid(ServiceException):
    code = "ValidationError"


class NotThere(Invalid):
    def __init__(self, name: str) -> None:
        super().__init__(f"Stack with id {name} does not exist")


class NoSuchChangeSet(ServiceException):
    code = "ChangeSetNotFound"


class AlreadyThere(ServiceException):
    code = "AlreadyExistsException"


class WrongState(ServiceException):
    code = "InvalidChangeSetStatus"


class MissingCapability(ServiceException):
    code = "InsufficientCapabilitiesException"


class Refused(Exception):
    """A resource cannot be created, updated or deleted as declared; the stack fails with this reason."""
