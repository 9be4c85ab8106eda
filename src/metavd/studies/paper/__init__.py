"""The paper's tables beside ours: what is missing, running it, comparing, and the page that says so.

    tables -> protocol -> plan -> run -> results/paper.jsonl -> statistics -> page

A run is named by what it computes, so cells of several tables share it and nothing is run twice. Each finished run is
one line of the store; an interruption loses the run in flight, and not even that where it has a work folder.
"""
