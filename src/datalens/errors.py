"""Errors a person can act on. The command line prints them as one line and exits with `exit_code`."""


class DatalensError(Exception):
    """Bad input: the message says what is wrong and what to do."""

    exit_code = 2

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code


class BudgetExceeded(DatalensError):
    """A release would cost more than the privacy budget holds. Nothing was released."""

    exit_code = 3


class TamperedError(DatalensError):
    """A ledger or certificate is not what was written."""


class SaidElsewhere(DatalensError):
    """The process that leads the run says it: this one, another rank of it, ends with the same code and no word."""


class UnpriceableEvent(DatalensError):
    """An accountant met an event it does not understand, and refuses to guess."""
