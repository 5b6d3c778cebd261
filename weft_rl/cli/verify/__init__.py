"""``weft verify``: comparison of what a pool serves with the files on this machine."""
