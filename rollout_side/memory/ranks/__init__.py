"""How the other ranks of a replica get what one receives: they map its buckets, over a socket."""
