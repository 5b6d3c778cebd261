"""The stream plane: buckets in pieces over TCP, each receiver passing on what it has to the next.

The sender's one copy is what a push costs its link, whatever the number of receivers.
"""
