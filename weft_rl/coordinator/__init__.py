"""The coordinator: a pure state machine, its durable catalog, and its services.

``decisions`` decides; ``runtime`` carries out; ``services`` translate. No tensor passes
through here, and torch is never imported.
"""
