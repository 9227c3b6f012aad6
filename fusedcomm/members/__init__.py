"""Members: who is in the group, agreed without a server."""
