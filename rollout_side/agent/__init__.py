"""A replica's conversation with the pool: it registers, beats, and carries out orders."""
