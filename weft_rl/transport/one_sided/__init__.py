"""The backend for members on one host: receivers copy out of the sender's buffers themselves.

The sender's buffers are memory files, which it hands to the receivers over a Unix socket; from
then on a broadcast is a message to each of them, a copy by each, and a message back. Nobody
spins, a dead peer is a closed socket, and an abort really ends what is under way.
"""
