"""From personalised models to figures: predictions -> metrics."""
