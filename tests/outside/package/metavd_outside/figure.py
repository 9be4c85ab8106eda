"""A figure: how often a model is sure of its answer."""

from metavd.evaluate.figures import figure


@figure(help="share of answers with a probability above 0.6", unit="%", digits=1, high=1.0, client=True,
        headline="always")  # fmt: skip
def sure(answers):
    """One number per test row; the figure is their mean."""
    return answers.probs.max(1) > 0.6
