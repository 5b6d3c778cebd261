"""What commands share: the connection, options, tables."""
