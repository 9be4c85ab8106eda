"""Real federations: the methods of this package on Flower, in deployment and in simulation. Only here flwr is known.

| module | what it is |
|---|---|
| `config` | the run config of `flwr run` as one checked value, and the app that it belongs to |
| `message` | what stands in a message, both ways |
| `site` | a client's own rows |
| `client` | the ClientApp: hello, train, evaluate |
| `registry` | who is which client, across restarts |
| `fleet` | the nodes that are there, and waiting for their answers |
| `server` | the ServerApp: rounds, quorum, checkpoints, evaluation |
| `figures` | results from clients' own figures |
| `security` | certificates and keys |
| `local` | SuperLink and SuperNodes on this machine, started and stopped |
| `warm` | clients' work without starting Python anew for every message |
"""
