"""What tests of federations share: a federation without processes, and faults that strike it.

| module | what it is |
|---|---|
| `grid` | calls ClientApps where Flower would send messages; the rest is what is deployed |
| `stage` | such a grid on which one fault happens |
| `answers`, `waits`, `misfortunes`, `edges` | the faults: of answers, of clients, of the server, at both ends |
| `lies` | more of them: every field with every value that it must not have |
| `looks` | sites that lie about rows of their own |
| `files` | a stopped run whose files were damaged |
| `rehearsal` | a run in this process that a fault strikes, beside the simulator without it |
| `processes` | the same with real SuperLinks, SuperNodes and ServerApps, which are killed, frozen or cut off |
| `page` | the outcomes as a table, and docs/faults.md |
"""

from __future__ import annotations

from . import answers, edges, lies, misfortunes, waits
from .stage import Fault

FAULTS: list[Fault] = [*answers.REPLIES, *waits.WAITS, *misfortunes.SERVER, *edges.OTHERS, *lies.ANSWERS, *lies.FIGURES,
                       *lies.HELLOS]  # fmt: skip
"""Every fault that can strike a federation in one process."""
