"""Parts that commands share: the connection, options, tables."""
