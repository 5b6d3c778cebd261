"""The coordinator: a pure state machine, its durable catalog, and its services.

``step`` decides; ``driver`` carries out; servicers translate. No tensor passes
through here, and torch is never imported.
"""
