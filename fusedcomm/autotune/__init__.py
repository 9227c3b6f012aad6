"""``config="auto"``: runs real steps with each candidate in turns and keeps the fastest."""
