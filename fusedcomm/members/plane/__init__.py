"""The control plane: who is in the group, agreed without a server. Its rules know no sockets."""
