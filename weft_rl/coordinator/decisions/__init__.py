"""What the coordinator decides: pure functions of its state, an event and the time.

``step`` is the door: it takes an event (``events``) and answers a new state and what is to
be done (``effects``). Nothing here waits, reads a clock, or knows of gRPC, a database or a
thread; an import contract holds it so.
"""
