"""The one base class for what a user did wrong, and the one for a run that failed all the same."""


class UserError(ValueError):
    """What is the user's to mend: the text is one sentence that names the value and says what would be right.

    The command line shows the sentence and ends with status 2. A module has a class of its own only where a caller
    tells its mistakes from others.
    """


class SpecError(UserError):
    """A setting, option, method or value that does not exist, or values that do not go together."""
