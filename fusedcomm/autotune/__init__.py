"""``wire="auto"``: real steps under each candidate, and the fastest of them."""
