"""The ways a run can end without a result, each with its exit status."""


class WorkbenchError(Exception):
    """A failure that a person can act on; the message is one sentence. Exit status 1."""

    status = 1


class BadInput(WorkbenchError):
    """The user's input cannot be run: the message names the field and the mend. Exit status 2."""

    status = 2

    def __init__(self, field: str, problem: str, mend: str):
        self.field, self.problem, self.mend = field, problem, mend
        super().__init__(f"{field}: {problem}; {mend}.")


class ServerFailed(WorkbenchError):
    """A server did not come up, went away or is not the one that was started."""


class Hung(ServerFailed):
    """A server whose processes live gave no token, or no answer, within its deadline."""
