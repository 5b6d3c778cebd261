"""Decisions of the coordinator: pure functions of its state, an event and the time.

``step`` is the entry point. It takes an event (``state.events``) and returns a new state and what
is to be done (``state.effects``). Nothing here waits, reads a clock, or knows of gRPC, a database
or a thread; an import contract enforces this.
"""
