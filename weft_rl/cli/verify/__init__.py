"""``weft verify``: whether what a pool serves is what lies here."""
