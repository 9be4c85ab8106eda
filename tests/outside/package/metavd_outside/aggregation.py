"""An aggregation rule: every client counts alike, whatever its number of rows and however sure it is."""

from metavd.core.rules import Ballot, Rule, rule


@rule("alike", "every client counts alike")
def alike() -> Rule:
    """Give every client that votes at all one vote.

    consensus = sum_{i votes} x_i / number of those
    """

    def count(ballot: Ballot) -> Ballot:
        return ballot._replace(votes={name: (value > 0).to(value.dtype) for name, value in ballot.votes.items()})

    return count
