"""Real federations: the methods of this package on Flower, in deployment and in simulation. Only here flwr is known.

| module | what it is |
|---|---|
| `config` | the run config as one checked value, and the app that it belongs to |
| `message` | what stands in a message, both ways |
| `site` | a client's own rows |
| `client` | the ClientApp: hello, train, evaluate |
| `registry` | who is which client, across restarts |
| `fleet` | the nodes that are there, and waiting for their answers |
| `server` | the ServerApp: rounds, quorum, checkpoints, evaluation |
| `figures` | results from clients' own figures |
| `security` | certificates and keys |
| `link` | the SuperLink, which answers requests from outside for nodes alone |
| `warm` | the SuperNode, and apps that start without starting Python anew |
| `follow` | a run started through `flwr run`, and its true outcome |
| `local` | SuperLink, SuperNodes and runs on this machine, started and stopped |
| `rehearse` | all of it in one process, without network |
| `compat` | every lean on the inside of Flower |
"""
