"""``config="auto"``: runs real steps with each candidate and keeps the fastest."""
