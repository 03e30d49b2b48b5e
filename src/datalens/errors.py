"""Errors that a person can act on. The command line prints them as one line, and exits with `exit_code`."""


class DatalensError(Exception):
    """The input is invalid. The message says what is wrong and what to do."""

    exit_code = 2

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line, or the name of its class if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


class UnreadableImage(DatalensError):
    """A file cannot be read as an image, whatever the other files are: `--skip-unreadable` leaves it out."""


class NoTestImages(DatalensError):
    """The user's data has no test split."""


class BudgetExceeded(DatalensError):
    """A release would cost more than is left of the privacy budget. It did not take place."""

    exit_code = 3


class TamperedError(DatalensError):
    """A ledger or certificate was changed after it was written."""


class SaidElsewhere(DatalensError):
    """Ends a rank whose error rank 0 reports. It exits with the same code, and prints nothing."""


class UnpriceableEvent(DatalensError):
    """An accountant has no price for an event, and refuses to guess one."""
