"""The gRPC services of the coordinator: they translate between messages and events."""
