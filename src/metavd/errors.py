"""The one base class for what a user did wrong."""


class UserError(ValueError):
    """What is the user's to mend: the text is one sentence that names the value and says what would be right.

    The command line shows the sentence and ends with status 2. A module has a class of its own only where a caller
    tells its mistakes from others.
    """
